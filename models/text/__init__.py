"""Language models over packed rows of tokens, without halting, Q values and puzzle rows."""
