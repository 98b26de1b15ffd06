"""Documentation, and the programs that write its generated parts."""
