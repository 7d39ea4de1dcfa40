"""Messages and handshakes of a link's connections."""
