"""(Job, Plan) -> Step: forward, loss, backward, clip, update. Steps are made only here."""
