"""One module per framework; importing one never imports its framework."""
