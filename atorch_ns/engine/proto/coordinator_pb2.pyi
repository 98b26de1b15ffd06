from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CreateJobRequest(_message.Message):
    __slots__ = ("job", "world_size", "setting", "settings", "candidates")
    JOB_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    SETTING_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    job: str
    world_size: int
    setting: bytes
    settings: bytes
    candidates: bytes
    def __init__(self, job: _Optional[str] = ..., world_size: _Optional[int] = ..., setting: _Optional[bytes] = ..., settings: _Optional[bytes] = ..., candidates: _Optional[bytes] = ...) -> None: ...

class CreateJobReply(_message.Message):
    __slots__ = ("known_trials",)
    KNOWN_TRIALS_FIELD_NUMBER: _ClassVar[int]
    known_trials: int
    def __init__(self, known_trials: _Optional[int] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("job", "rank", "session", "last_task_id")
    JOB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LAST_TASK_ID_FIELD_NUMBER: _ClassVar[int]
    job: str
    rank: int
    session: str
    last_task_id: int
    def __init__(self, job: _Optional[str] = ..., rank: _Optional[int] = ..., session: _Optional[str] = ..., last_task_id: _Optional[int] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("incarnation", "world_size", "heartbeat_s")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    world_size: int
    heartbeat_s: float
    def __init__(self, incarnation: _Optional[str] = ..., world_size: _Optional[int] = ..., heartbeat_s: _Optional[float] = ...) -> None: ...

class Caller(_message.Message):
    __slots__ = ("job", "rank", "incarnation")
    JOB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    job: str
    rank: int
    incarnation: str
    def __init__(self, job: _Optional[str] = ..., rank: _Optional[int] = ..., incarnation: _Optional[str] = ...) -> None: ...

class NextTaskRequest(_message.Message):
    __slots__ = ("caller", "done_id", "wait_s")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    DONE_ID_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    done_id: int
    wait_s: float
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., done_id: _Optional[int] = ..., wait_s: _Optional[float] = ...) -> None: ...

class NextTaskReply(_message.Message):
    __slots__ = ("task", "over", "ask_again_s")
    TASK_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    ASK_AGAIN_S_FIELD_NUMBER: _ClassVar[int]
    task: bytes
    over: Over
    ask_again_s: float
    def __init__(self, task: _Optional[bytes] = ..., over: _Optional[_Union[Over, _Mapping]] = ..., ask_again_s: _Optional[float] = ...) -> None: ...

class Over(_message.Message):
    __slots__ = ("outcome", "error", "failures")
    class FailuresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: str
        def __init__(self, key: _Optional[int] = ..., value: _Optional[str] = ...) -> None: ...
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    outcome: bytes
    error: str
    failures: _containers.ScalarMap[int, str]
    def __init__(self, outcome: _Optional[bytes] = ..., error: _Optional[str] = ..., failures: _Optional[_Mapping[int, str]] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("caller", "report")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    report: bytes
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., report: _Optional[bytes] = ...) -> None: ...

class ReportReply(_message.Message):
    __slots__ = ("verdict",)
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    verdict: str
    def __init__(self, verdict: _Optional[str] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("caller", "watch", "num_events")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    WATCH_FIELD_NUMBER: _ClassVar[int]
    NUM_EVENTS_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    watch: bool
    num_events: int
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., watch: bool = ..., num_events: _Optional[int] = ...) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ("cancel", "over", "events")
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    cancel: _containers.RepeatedScalarFieldContainer[int]
    over: bool
    events: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, cancel: _Optional[_Iterable[int]] = ..., over: bool = ..., events: _Optional[_Iterable[bytes]] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("caller", "reason")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    reason: str
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class CancelReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("caller", "reason")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    reason: str
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
