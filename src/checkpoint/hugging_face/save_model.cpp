// Saves a job's model alone, from the shards of any mesh.
//
// [Note: writing the model alone]
//   file    holds whole tensors; each has one writer, a rank
//   slice   the part of a tensor that its writer gathers, converts and writes at once: at most about 16 MiB
//   round   one slice for each writer: the ranks that hold parts of it send them, without a collective call
// While a writer writes a slice, the parts of its next one arrive. So a rank needs memory for two slices, and
// for the parts that it sends to the writers of two rounds. When all files are written, rank 0 writes
// everything else, the manifest last. A rank that fails keeps sending, because the others wait for its parts.

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "checkpoint/format/safetensors_writer.h"
#include "checkpoint/hugging_face/model_folder.h"
#include "checkpoint/save/save_plan.h"
#include "checkpoint/save/save_writer.h"
#include "core/file.h"
#include "titan/checkpoint/hugging_face.h"
#include "titan/checkpoint/storage.h"
#include "titan/core/error.h"
#include "titan/dist/collectives.h"

namespace titan {
namespace {

namespace fs = std::filesystem;
using checkpoint::detail::from_rank_0;
using checkpoint::detail::NamedTensor;
using checkpoint::detail::problem_of;
using checkpoint::detail::SaveReport;

constexpr dist::Label kSaveLabel{.phase = "checkpoint::save_model"};
constexpr int64_t kSliceBytes = 16 << 20;
// All slices of a round together: one rank may hold parts of all of them.
constexpr int64_t kRoundBytes = 256 << 20;
constexpr int64_t kMostEvenFiles = 128;

// ---- who writes what; the same on all ranks

struct ModelTensor {
  size_t position = 0;  // in the plan's table
  int64_t rotary_head_dim = 0;
};

struct ModelPlan {
  detail::ModelFiles files;
  std::vector<ModelTensor> tensors;  // by entry
};

std::vector<NamedTensor> named(const std::vector<Parameter>& parameters) {
  std::vector<NamedTensor> tensors;
  std::set<std::string> names;
  for (const Parameter& parameter : parameters) {
    TITAN_CHECK(parameter.duplicate || names.insert(parameter.name).second,
                "two parameters have the same name, '", parameter.name, "'");
    tensors.push_back({parameter.name, parameter.data, parameter.duplicate});
  }
  return tensors;
}

// Files of at most options.folder.shard_bytes, and as many as there are ranks if they aren't too small.
std::vector<detail::Shard> shards_of(const std::vector<SafetensorsEntry>& entries, int world_size,
                                     const ModelSaveOptions& options) {
  int64_t total = 0;
  for (const SafetensorsEntry& entry : entries) total += num_bytes(entry);
  const int64_t shares = std::min<int64_t>({world_size, kMostEvenFiles, total / options.least_file_bytes});
  std::vector<detail::Shard> shards = detail::cut(entries, options.folder.shard_bytes);
  return static_cast<int64_t>(shards.size()) >= shares ? shards : detail::cut_evenly(entries, shares);
}

ModelPlan plan_of(const checkpoint::StateTable& table, int world_size, const ModelSaveOptions& options) {
  std::map<std::string, const HfTensor*> known;
  if (options.hf)
    for (const HfTensor& tensor : options.hf->tensors) known.emplace(tensor.name, &tensor);
  std::vector<SafetensorsEntry> entries;
  for (const checkpoint::StateTensor& tensor : table.tensors())
    entries.push_back({tensor.name, options.export_dtype.value_or(tensor.dtype), tensor.shape});
  TITAN_CHECK(!entries.empty(), "a model without parameters can't be saved");
  TITAN_CHECK(!options.hf || entries.size() == known.size(), "the model has ", entries.size(),
              " parameters, Hugging Face's form of it ", known.size());
  sort_for_file(entries);
  ModelPlan plan{.files = {.hf = options.hf, .entries = {}, .shards = {}}, .tensors = {}};
  for (SafetensorsEntry& entry : entries) {
    plan.tensors.push_back({.position = *table.find(entry.name)});
    if (!options.hf) continue;
    const auto found = known.find(entry.name);
    TITAN_CHECK(found != known.end(), "parameter '", entry.name,
                "' has no name in Hugging Face's form of the model");
    const HfTensor& tensor = *found->second;
    TITAN_CHECK(tensor.shape == entry.shape, "parameter '", entry.name, "' has shape ",
                at::IntArrayRef(entry.shape), ", in Hugging Face's form of the model ",
                at::IntArrayRef(tensor.shape));
    plan.tensors.back().rotary_head_dim = tensor.rotary_head_dim;
    entry.name = tensor.hf_name;
  }
  plan.files.entries = std::move(entries);
  plan.files.shards = shards_of(plan.files.entries, world_size, options);
  return plan;
}

// Spread over the ranks, and so over the hosts.
int writer_of(size_t file, size_t num_files, int world_size) {
  const auto size = static_cast<size_t>(world_size);
  return static_cast<int>(num_files < size ? file * size / num_files : file % size);
}

struct Slice {
  size_t file = 0, entry = 0;
  Box box;
};

using SlicesByWriter = std::map<int, std::vector<Slice>>;

SlicesByWriter slices_of(const ModelPlan& plan, int world_size) {
  const auto num_files = static_cast<int64_t>(plan.files.num_files());
  const int64_t bytes = std::clamp(kRoundBytes / std::min<int64_t>(num_files, world_size),
                                   checkpoint::kBlockBytes, kSliceBytes);
  SlicesByWriter slices;
  for (size_t file = 0; file < plan.files.num_files(); ++file) {
    std::vector<Slice>& own = slices[writer_of(file, plan.files.num_files(), world_size)];
    const detail::Shard& shard = plan.files.shards[file];
    for (size_t entry = shard.begin; entry < shard.end; ++entry)
      for (Box& box :
           detail::pieces_of(plan.files.entries[entry], plan.tensors[entry].rotary_head_dim, bytes))
        own.push_back({file, entry, std::move(box)});
  }
  return slices;
}

// ---- a round

Box common_part(const Box& a, const Box& b) {
  Box box;
  for (size_t dim = 0; dim < a.offset.size(); ++dim) {
    const int64_t begin = std::max(a.offset[dim], b.offset[dim]);
    const int64_t end = std::min(a.offset[dim] + a.length[dim], b.offset[dim] + b.length[dim]);
    box.offset.push_back(begin);
    box.length.push_back(end - begin);
  }
  return box;
}

// The elements of `part` in a tensor that represents `box`.
at::Tensor view_of(const at::Tensor& tensor, const Box& box, const Box& part) {
  at::Tensor view = tensor;
  for (size_t dim = 0; dim < part.offset.size(); ++dim)
    view = view.narrow(static_cast<int64_t>(dim), part.offset[dim] - box.offset[dim], part.length[dim]);
  return view;
}

class Round {
 public:
  explicit Round(std::shared_ptr<dist::Group> group) : group_(std::move(group)) {}

  void begin(const Slice& slice, at::ScalarType dtype) {
    slice_ = &slice;
    whole_ = at::empty(slice.box.length, at::dtype(dtype));
  }
  void put(const Box& part, const at::Tensor& values) { view_of(whole_, slice_->box, part).copy_(values); }
  void send(const at::Tensor& values, int peer) {
    const at::Tensor message = values.to(at::kCPU).contiguous().view(-1);
    sent_.push_back(group_->send(message, peer, kSaveLabel));
  }
  void receive(const Box& part, int peer) {
    const at::Tensor message = at::empty({part.numel()}, whole_.options());
    received_.push_back({group_->receive(message, peer, kSaveLabel), message.view(part.length), part});
  }
  // This rank's slice and its values; null: it has none in this round.
  std::pair<const Slice*, at::Tensor> finish() {
    for (Received& each : received_) {
      each.work.wait();
      put(each.part, each.values);
    }
    for (dist::Work& work : sent_) work.wait();
    return {slice_, whole_};
  }

 private:
  struct Received {
    dist::Work work;
    at::Tensor values;
    Box part;
  };

  std::shared_ptr<dist::Group> group_;
  const Slice* slice_ = nullptr;
  at::Tensor whole_;
  std::vector<Received> received_;
  std::vector<dist::Work> sent_;
};

// ---- writing this rank's files

class FileWriter {
 public:
  FileWriter(const ModelPlan& plan, fs::path folder) : plan_(plan), folder_(std::move(folder)) {
    report_.failure = problem_of([&] {
      make_folder(folder_);
      report_.free_bytes = free_bytes_of(folder_).value_or(-1);
    });
  }

  void write(const Slice& slice, const at::Tensor& values) {
    attempt([&] {
      if (!writer_ || slice.file != file_) start(slice.file);
      const RowOrder order = plan_.files.hf ? RowOrder::HuggingFace : RowOrder::Ours;
      writer_->append(slice.entry - plan_.files.shards[file_].begin,
                      reorder_rows(values, plan_.tensors[slice.entry].rotary_head_dim, order));
    });
  }

  // `needed_bytes`: of all files of this rank.
  SaveReport finish(int64_t needed_bytes) {
    attempt([&] { end_file(); });
    writer_.reset();
    report_.file.num_bytes = needed_bytes;
    report_.texts = std::move(done_);
    return std::move(report_);
  }

 private:
  template <class Part>
  void attempt(const Part& part) {
    if (!report_.failure.empty()) return;
    report_.failure = problem_of([&] {
      try {
        part();
      } catch (const DiskFull& full) {
        report_.disk_full = full.reason;
        throw;
      }
    });
    if (!report_.failure.empty()) writer_.reset();  // removes the file
  }

  void start(size_t file) {
    end_file();
    file_ = file;
    writer_.emplace(folder_ / plan_.files.name(file), plan_.files.in_file(file), plan_.files.metadata());
  }

  void end_file() {
    if (!writer_) return;
    const checkpoint::WrittenFile written = writer_->finish();
    writer_.reset();
    done_.push_back(checkpoint::detail::to_wire(file_, written.record.num_bytes, written.record.header_digest,
                                                written.finite));
  }

  const ModelPlan& plan_;
  fs::path folder_;
  size_t file_ = 0;
  std::optional<detail::SafetensorsWriter> writer_;
  std::vector<std::string> done_;
  SaveReport report_;
};

// ---- the whole

class ModelSave {
 public:
  ModelSave(const std::vector<NamedTensor>& tensors, const dist::World& world,
            const ModelSaveOptions& options)
      : world_(world),
        group_(world.everyone()),
        table_(checkpoint::detail::SavePlan(tensors, world, options.pipeline).table()),
        plan_(plan_of(table_, world.size(), options)),
        slices_(slices_of(plan_, world.size())) {
    for (const NamedTensor& tensor : tensors)
      if (!tensor.duplicate) own_.emplace(*table_.find(tensor.name), &tensor.data);
  }

  // Throws the same Error on all ranks.
  std::vector<checkpoint::WrittenFile> write_files(const fs::path& folder) {
    size_t num_rounds = 0;
    for (const auto& [writer, slices] : slices_) num_rounds = std::max(num_rounds, slices.size());
    FileWriter writer(plan_, folder);
    Round next = start(0);
    for (size_t round = 0; round < num_rounds; ++round) {
      const auto [slice, values] = next.finish();
      next = start(round + 1);
      if (slice) writer.write(*slice, values);
    }
    return merge(folder, writer.finish(needed_bytes(world_.rank())));
  }

  const detail::ModelFiles& files() const { return plan_.files; }

 private:
  Round start(size_t number) const {
    Round round(group_);
    for (const auto& [writer, slices] : slices_) {
      if (number >= slices.size()) continue;
      const Slice& slice = slices[number];
      const bool writes = writer == world_.rank();
      const at::ScalarType dtype = plan_.files.entries[slice.entry].dtype;
      if (writes) round.begin(slice, dtype);
      const size_t position = plan_.tensors[slice.entry].position;
      for (const checkpoint::Source& source : table_.sources_of(position, slice.box)) {
        const bool holds = source.rank == world_.rank();
        if (!holds && !writes) continue;
        const Box part = common_part(source.box, slice.box);
        if (!holds) {
          round.receive(part, static_cast<int>(source.rank));
          continue;
        }
        const DTensor& tensor = *own_.at(position);
        const at::Tensor values = view_of(tensor.local.detach(), tensor.box, part).to(dtype);
        writes ? round.put(part, values) : round.send(values, writer);
      }
    }
    return round;
  }

  int64_t needed_bytes(int rank) const {
    int64_t bytes = 0;
    for (size_t file = 0; file < plan_.files.num_files(); ++file)
      if (writer_of(file, plan_.files.num_files(), world_.size()) == rank)
        bytes += detail::checked_file_bytes(plan_.files.in_file(file), plan_.files.metadata());
    return bytes;
  }

  std::vector<checkpoint::WrittenFile> merge(const fs::path& folder, const SaveReport& own) const {
    using namespace checkpoint::detail;
    std::vector<SaveReport> reports;
    for (const std::string& text : group_->all_gather_text(to_wire(own), kSaveLabel))
      reports.push_back(from_wire<SaveReport>(text));
    std::vector<checkpoint::WrittenFile> written(plan_.files.num_files());
    std::string problems = disk_full_text(folder.parent_path(), reports);
    if (!problems.empty()) throw Error(problems);
    for (size_t rank = 0; rank < reports.size(); ++rank) {
      if (!reports[rank].failure.empty())
        problems +=
            titan::str(problems.empty() ? "" : "; ", world_.size() > 1 ? titan::str("rank ", rank, ": ") : "",
                       reports[rank].failure);
      for (const std::string& text : reports[rank].texts) {
        size_t file = 0;
        checkpoint::WrittenFile done;
        WireReader{text}(file, done.record.num_bytes, done.record.header_digest, done.finite);
        written.at(file) = std::move(done);
      }
    }
    if (!problems.empty()) throw Error(problems);
    return written;
  }

  dist::World world_;
  std::shared_ptr<dist::Group> group_;
  checkpoint::StateTable table_;
  ModelPlan plan_;
  SlicesByWriter slices_;
  std::map<size_t, const DTensor*> own_;  // by position in the table
};

}  // namespace

void save_model(const std::vector<Parameter>& parameters, const dist::World& world, const fs::path& folder,
                const ModelSaveOptions& options) {
  checkpoint::require_local(folder, "a folder of a model alone");
  at::NoGradGuard no_grad;
  const std::vector<NamedTensor> tensors = named(parameters);
  ModelSave save(tensors, world, options);
  std::optional<detail::NewFolder> made;  // on rank 0
  const fs::path place = from_rank_0(world, kSaveLabel, [&] {
    if (!options.folder.in_place) made.emplace(folder);
    return (made ? made->path() : folder).string();
  });
  const auto written = save.write_files(place);
  from_rank_0(world, kSaveLabel, [&] {
    detail::finish_model_folder(place, save.files(), written, options.folder);
    if (made) made->commit();
    return std::string();
  });
}

}  // namespace titan
