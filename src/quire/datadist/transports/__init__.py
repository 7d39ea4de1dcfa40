"""The ways in which bytes of caches travel, behind one interface."""
