"""The processes that compute for an engine, and the engine's ends of their connections.

runner             one rank of the model, as a Ray actor
rank_weights       a rank's calls for weight updates
runner_group       starts, checks and replaces the ranks and the draft
step_channel       carries plans to ranks and results back
plan_wire          encodes plans; each grammar crosses a connection once
draft              a draft model as a Ray actor, and its connection
weight_parts       parts of a weight update that cross processes"""
