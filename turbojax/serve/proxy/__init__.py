"""Several replicas behind one address: who is asked, what happens when one fails, and the bytes in between."""
