"""GeoMesh: peer-to-peer training of language models over the internet."""

__version__ = "0.1.0"
PROTOCOL_VERSION = 5
