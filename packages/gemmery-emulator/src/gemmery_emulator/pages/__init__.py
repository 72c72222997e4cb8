"""What pages are made of: drawings, templates and numbers as text."""
