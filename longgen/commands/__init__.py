"""The commands: parse, wire, print, no logic. What is slow to import is imported by the command that needs it."""
