#pragma once

// Everything that a training loop of one's own needs. The program's parts (config, trainer, command line)
// have headers of their own.

#include "titan/core/crash.h"
#include "titan/dist/collectives.h"
#include "titan/dist/device_mesh.h"
#include "titan/dist/world.h"
#include "titan/guard/watchdog.h"
#include "titan/nn/module.h"
#include "titan/optim/clip.h"
#include "titan/optim/lr_schedule.h"
#include "titan/optim/optimizer.h"
#include "titan/parallel/activation_checkpoint.h"
#include "titan/parallel/context_parallel.h"
#include "titan/parallel/fsdp.h"
#include "titan/parallel/parameters.h"
#include "titan/parallel/tensor_parallel.h"
#include "titan/tensor/dtensor.h"
