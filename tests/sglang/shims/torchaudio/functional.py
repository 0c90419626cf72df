"""Imported by SGLang; there is no build of it for the CPU, and text models use nothing of it."""
