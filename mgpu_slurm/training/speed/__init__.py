"""How fast a training goes, and what holds it up."""
