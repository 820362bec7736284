"""What processes exchange: the transport, the messages, and the types inside them.

transport          connections that carry frames, opened by invitation
link_messages      the messages between a front and an engine
weight_calls       the calls about an engine's weights, and their answers
engine_client      the engines' interface for fronts, and its errors
adapter_entry      adapter names and states
metrics            all metric names, and values that can be added up
process_meter      memory and CPU time of processes"""
