"""The page of `stoker ui`: runs, plans, studies, places and services of this machine, in a browser. It reads records."""
