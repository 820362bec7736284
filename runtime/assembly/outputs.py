"""The output of a step by request, for a caller without a connection in between."""

from __future__ import annotations

from runtime.base.types import NOT_FINITE, FinishReason, RequestOutput, StepOutput
from runtime.core.request_state import RequestState


def outputs_by_request(step: StepOutput) -> dict[RequestState, RequestOutput]:
    """Return the columns of a step by request."""
    gained: dict[RequestState, RequestOutput] = {}

    def output_of(state: RequestState) -> RequestOutput:
        if state not in gained:
            gained[state] = RequestOutput(state.request.request_id, [], num_cached=state.num_cached or 0)
        return gained[state]

    for i, (state, token) in enumerate(zip(step.states, step.token_ids, strict=True)):
        output = output_of(state)
        output.token_ids.append(token)
        if i in step.logprobs:
            output.logprobs.append(step.logprobs[i])
    for state, report in step.reports:
        output_of(state).reports = [*output_of(state).reports, report]
    for state, reason in step.finished:
        output = output_of(state)
        output.finish_reason, output.error = reason, NOT_FINITE if reason is FinishReason.ERROR else state.failure
        if reason is FinishReason.STOP and state.tokens[-1] in state.params.stop_token_ids:
            output.stop_token_id = state.tokens[-1]
    return gained
