"""The page of `stoker ui`: runs, plans, studies, places and services in a browser. It reads records."""
