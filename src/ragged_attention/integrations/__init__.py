"""Plug-ins that run our operations in other programs, through their interfaces for external attention."""
