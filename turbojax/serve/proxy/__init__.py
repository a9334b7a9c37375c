"""Several replicas behind one address: who is asked, what happens when one fails, and the bytes in between."""

DEFAULT_PORT = 8000  # of LMDeploy's `serve proxy`
