"""OpenAI's, Anthropic's and Ollama's request shapes, and their translation to the engine's own.

What a field may hold is said once, here. A field that would change the answer but is not supported is refused; other
unknown fields are ignored, and named in a header of the answer.
"""

from serve_app.apis.anthropic.request import CountTokensRequest, MessagesRequest
from serve_app.apis.chat.messages import ChatMessage
from serve_app.apis.chat.request import ChatRequest
from serve_app.apis.completions.request import CompletionRequest
from serve_app.apis.ollama.request import LoadRequest, OllamaChatRequest, OllamaGenerateRequest
from serve_app.apis.pooled.request import EmbeddingRequest, PoolingRequest, RerankRequest, ScoreRequest
from serve_app.apis.responses.request import ResponsesRequest
from serve_app.protocol.parsing import AbortRequest, GrammarRequest, parse
from serve_app.protocol.sampling import MAX_CHOICES, SamplingFields

__all__ = [
    "MAX_CHOICES",
    "AbortRequest",
    "ChatMessage",
    "ChatRequest",
    "CompletionRequest",
    "CountTokensRequest",
    "EmbeddingRequest",
    "GrammarRequest",
    "LoadRequest",
    "MessagesRequest",
    "OllamaChatRequest",
    "OllamaGenerateRequest",
    "PoolingRequest",
    "RerankRequest",
    "ResponsesRequest",
    "SamplingFields",
    "ScoreRequest",
    "parse",
]
