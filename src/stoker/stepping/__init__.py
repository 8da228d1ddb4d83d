"""(Job, Plan) -> Step: forward, loss, backward, clip, update. Nobody else writes a step."""
