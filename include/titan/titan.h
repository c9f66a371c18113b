#pragma once

// Everything for your own training loop: device meshes, sharding and tensor, context and data parallelism,
// optimizers, clipping, batches of text, and checkpoints. Link Titan::train, which has all of it.
// docs/examples/custom_trainer is such a loop, and includes no other header of LibTitan.
//
//   const titan::dist::World world = titan::dist::init();
//   const auto mesh = titan::DeviceMesh::create(world, {{"dp_shard", -1}});
//   titan::fully_shard(model, {.mesh = mesh["dp_shard"]});
//
// Run observers, guards and the command line have separate headers (link Titan::titan).

#include "titan/checkpoint/checkpointer.h"
#include "titan/checkpoint/step_folder.h"
#include "titan/core/crash.h"
#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/data/feed.h"
#include "titan/data/loader.h"
#include "titan/dist/collectives.h"
#include "titan/dist/device_mesh.h"
#include "titan/dist/world.h"
#include "titan/nn/containers.h"
#include "titan/nn/layers.h"
#include "titan/nn/loss.h"
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
#include "titan/train/checkpoint_state.h"
