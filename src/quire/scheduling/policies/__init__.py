"""What the scheduler leaves to choice: order of service, admission, victims. See docs/policies.md."""

from quire.registry import Registry
from quire.scheduling.policies.admission import AdmissionPolicy, PastFuture, Reserve
from quire.scheduling.policies.order import (
    FairShare,
    FirstComeFirstServed,
    LongestPrefix,
    Priority,
    QueueOrder,
)
from quire.scheduling.policies.victim import FewestComputed, Last, VictimPolicy

ORDERS: Registry[QueueOrder] = Registry(
    "SchedulerConfig.policy",
    QueueOrder,
    {
        "fcfs": FirstComeFirstServed,
        "priority": Priority,
        "fair": FairShare,
        "longest-prefix": LongestPrefix,
    },
)

ADMISSIONS: Registry[AdmissionPolicy] = Registry(
    "SchedulerConfig.admission", AdmissionPolicy, {"reserve": Reserve, "past-future": PastFuture}
)

VICTIMS: Registry[VictimPolicy] = Registry(
    "SchedulerConfig.victim", VictimPolicy, {"last": Last, "fewest-computed": FewestComputed}
)

__all__ = ["ADMISSIONS", "ORDERS", "VICTIMS", "AdmissionPolicy", "QueueOrder", "VictimPolicy"]
