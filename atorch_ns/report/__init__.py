"""Pictures and pages made from data that other packages give."""
