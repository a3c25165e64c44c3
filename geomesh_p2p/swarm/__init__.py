"""Everything that talks to other peers; the only room that imports hivemind."""
