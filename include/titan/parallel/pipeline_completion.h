#pragma once

// From a schedule of compute actions to one that the runtime executes:
//   with_parameter_actions(with_communication(schedule))
//
// [Note: what the runtime does with each]
// Every directed pair of ranks has one channel, first in, first out. A send is started behind the action that
// made its tensor and waited for when its buffer is needed again. A receive is posted, with a buffer of its
// own, when the runtime meets it, and waited for by the F, B or I that works on it. Stages of one rank hand
// over locally: no send, no receive. Unshard starts gathering; the stage's next F, B, I or W waits for it.

#include "titan/parallel/pipeline_schedule.h"

namespace titan::pipeline {

/// Adds a send behind, and a receive ahead of, every F, B and I whose neighbour is on another rank.
/// On each channel the receives stand in the order of the sends. A receive stands one compute action ahead of
/// its use, so one message is on its way while the rank computes; earlier only where a message used earlier
/// is sent behind it, or where otherwise ranks would wait for each other in a circle. The result runs even
/// where a send lasts until its receive is posted (channel_capacity 0). Unchanged if the schedule has sends
/// or receives. Throws ConfigError for a schedule that couldn't run (check_schedule()).
Schedule with_communication(const Schedule& schedule);

/// Adds Unshard and Reshard, such that no rank holds more than `max_gathered_stages` stages gathered: always
/// those that it needs next, which gathers ahead of use. None is gathered at the end. Adds one Reduce per
/// stage behind its last B or W (and behind the send that waits there: a peer needs it). Unshard and Reshard
/// are left as they are if the schedule has any, Reduce likewise.
Schedule with_parameter_actions(const Schedule& schedule, int max_gathered_stages = 3);

}  // namespace titan::pipeline
