"""A mesh on one machine, its reports, and the checker of recorded histories."""
