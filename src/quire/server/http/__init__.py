"""HTTP/1.1 connections: accepting, limits, TLS, sockets, and stopping."""
