"""`pipeline report`: what runs did, as one HTML file and as a picture, made from the files in their folders alone."""
