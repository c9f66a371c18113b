#pragma once

// Messages of one schedule that can travel as one call, where the backend has such calls (NCCL's groups).

#include <functional>
#include <vector>

#include "titan/parallel/pipeline_schedule.h"

namespace titan::pipeline {

/// Whether two sends, of one rank to one other, may be one call; both ends have to answer alike.
using MayJoin = std::function<bool(const Action&, const Action&)>;

/// By rank and action of a complete schedule (pipeline_completion.h): whether it is a message that goes in
/// one call with the action behind it. So do messages that stand side by side, in the order of their channel,
/// both where they are sent and where they are received. Where only the sends or only the receives do, they
/// stay apart: a call is done when its last message is, and would keep the first from whoever could use it.
/// A schedule that is free of circles stays so: nothing stands between the messages on either side.
std::vector<std::vector<bool>> joined_with_next(const Schedule& schedule, const MayJoin& may_join);

}  // namespace titan::pipeline
