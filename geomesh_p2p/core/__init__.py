"""Pure decisions and maths: no I/O, no clock, no sockets; time and seed are arguments."""
