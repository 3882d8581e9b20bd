"""Plug-ins for other programs: our operations under those programs' interfaces for external attention."""
