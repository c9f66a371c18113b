#include "titan/checkpoint/manifest.h"

#include <charconv>
#include <iomanip>
#include <sstream>
#include <utility>

#include <c10/util/StringUtil.h>

#include "checkpoint/format/safetensors_header.h"
#include "checkpoint/format/stored_files.h"
#include "core/json.h"
#include "titan/core/error.h"

// [Note: the digest]
// The text is a JSON object whose beginning has exactly one form,
//
//   {"titan_checkpoint":1,"digest":"<32 hexadecimal digits>",
//
// and a line feed. The digest covers every byte after it. So a changed bit is either in the beginning, which
// then no longer has that form, or in the digest or the bytes it covers, which then no longer match.

namespace titan::checkpoint {
namespace {

constexpr std::string_view kStart = R"({"titan_checkpoint":)";
constexpr std::string_view kBeforeDigest = R"(,"digest":")";
constexpr std::string_view kAfterDigest = "\",\n";
constexpr size_t kDigestDigits = 32;
constexpr int64_t kMaxRanks = 1'000'000;
constexpr int64_t kMaxThreads = 1'000'000;
constexpr size_t kMaxTexts = 1'000;
constexpr int64_t kMaxTensors = 10'000'000;
constexpr int64_t kMaxLayouts = 100'000;
constexpr int64_t kMaxAxes = 64;
constexpr size_t kMostDims = 64;
constexpr int64_t kMaxFileBytes = int64_t{1} << 62;  // all files together

// ---- checks of values, before writing and after reading

bool is_digest(std::string_view text) {
  return text.size() == kDigestDigits && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

void check_values(const Manifest& manifest) {
  TITAN_CHECK(is_digest(manifest.run_id), "run_id has to be 32 lower-case hexadecimal digits");
  TITAN_CHECK(manifest.step >= 0, "step ", manifest.step, " is negative");
  TITAN_CHECK(manifest.num_threads >= 0 && manifest.num_threads <= kMaxThreads, "num_threads ",
              manifest.num_threads, "; 0 to ", kMaxThreads, " are allowed");
  TITAN_CHECK(manifest.texts.size() <= kMaxTexts, manifest.texts.size(), " texts; at most ", kMaxTexts,
              " are allowed");
  for (const auto& [key, text] : manifest.texts) {
    const std::string problem = detail::name_problem(key);
    TITAN_CHECK(problem.empty(), "a text's name ", problem);
  }
}

void check_size(size_t num_bytes) {
  TITAN_CHECK(num_bytes <= static_cast<size_t>(kMaxManifestBytes), "a manifest of ", num_bytes,
              " bytes; at most ", kMaxManifestBytes, " are allowed");
}

void check_files(const std::vector<FileRecord>& files) {
  TITAN_CHECK(!files.empty() && files.size() <= static_cast<size_t>(kMaxRanks), files.size(), " files; 1 to ",
              kMaxRanks, " are allowed");
  int64_t total = 0;
  for (size_t rank = 0; rank < files.size(); ++rank) {
    TITAN_CHECK(files[rank].num_bytes >= 0, "files[", rank, "]: ", files[rank].num_bytes, " bytes");
    const bool overflows = __builtin_add_overflow(total, files[rank].num_bytes, &total);
    TITAN_CHECK(!overflows && total <= kMaxFileBytes, "files of more than ", kMaxFileBytes,
                " bytes together, up to files[", rank, "]");
    TITAN_CHECK(is_digest(files[rank].header_digest), "files[", rank,
                "]: the digest has to be 32 lower-case hexadecimal digits");
  }
}

// ---- writing: a line for each tensor, layout, text and file, for people and their tools

std::string text_of(const TensorLayout& layout) {
  std::vector<std::string> axes;
  for (const LayoutAxis& axis : layout.axes)
    axes.push_back(str(R"({"axis":)", json_quoted(axis.name), R"(,"size":)", axis.size, R"(,"stride":)",
                       axis.stride, R"(,"dim":)", axis.dim, R"(,"only":)", axis.only, "}"));
  return "[" + c10::Join(",", axes) + "]";
}

std::string text_of(const StateTensor& tensor, size_t layout) {
  return str("[", json_quoted(tensor.name), ",\"", titan::detail::safetensors_name_of(tensor.dtype), "\",[",
             c10::Join(",", tensor.shape), "],", layout, "]");
}

std::string list_of(const std::vector<std::string>& elements) {
  return str("[", elements.empty() ? "" : "\n", c10::Join(",\n", elements), "]");
}

// "layouts", each once, and "tensors", which refer to them by position.
std::string table_fields(const std::vector<StateTensor>& tensors) {
  std::map<TensorLayout, size_t> positions;
  std::vector<std::string> layouts, rows;
  for (const StateTensor& tensor : tensors) {
    TITAN_CHECK(tensor.layout, "tensor '", tensor.name, "' has no layout");
    const auto [place, is_new] = positions.try_emplace(*tensor.layout, positions.size());
    if (is_new) layouts.push_back(text_of(*tensor.layout));
    rows.push_back(text_of(tensor, place->second));
  }
  return str("\"layouts\":", list_of(layouts), ",\n\"tensors\":", list_of(rows));
}

std::string text_of(const std::map<std::string, std::string>& texts) {
  std::vector<std::string> fields;
  for (const auto& [key, value] : texts) fields.push_back(str(json_quoted(key), ":", json_quoted(value)));
  return str("{", fields.empty() ? "" : "\n", c10::Join(",\n", fields), "}");
}

std::string text_of(const std::vector<FileRecord>& files) {
  std::vector<std::string> rows;
  for (const FileRecord& file : files)
    rows.push_back(str("[", file.num_bytes, ",\"", file.header_digest, "\"]"));
  return list_of(rows);
}

// ---- reading

// Reads the JSON. check_digest checks the form of its beginning.
class ManifestReader {
 public:
  Manifest read(std::string_view text) {
    const std::string problem = read_json(text, root_scope_);
    TITAN_CHECK(problem.empty(), problem);
    check_values(manifest_);
    check_files(manifest_.files);
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const int64_t position = layout_positions_[i];
      TITAN_CHECK(position >= 0 && position < static_cast<int64_t>(layouts_.size()), "tensors[", i,
                  "]: layout ", position, " of ", layouts_.size());
      tensors_[i].layout = layouts_[static_cast<size_t>(position)];
    }
    manifest_.table = StateTable(std::move(tensors_), static_cast<int64_t>(manifest_.files.size()));
    return std::move(manifest_);
  }

 private:
  std::string add_axis() {
    layout_.axes.push_back(axis_);
    return "";
  }
  std::string add_file() {
    manifest_.files.push_back(std::move(file_));
    return "";
  }
  std::string add_layout() {
    layouts_.push_back(std::make_shared<const TensorLayout>(std::exchange(layout_, {})));
    return "";
  }
  std::string add_tensor() {
    const auto dtype = titan::detail::dtype_of_safetensors_name(dtype_);
    if (!dtype) return str("unknown dtype '", dtype_.substr(0, 20), "'");
    tensors_.push_back({.name = std::move(name_), .dtype = *dtype, .shape = shape_, .layout = nullptr});
    layout_positions_.push_back(layout_position_);
    return "";
  }

  Manifest manifest_;
  std::vector<std::shared_ptr<const TensorLayout>> layouts_;
  std::vector<StateTensor> tensors_;
  std::vector<int64_t> layout_positions_;  // by tensor, position in layouts_

  // Fields of the file, axis, layout or tensor that is being read.
  int64_t format_ = 0;
  std::string digest_;
  FileRecord file_;
  TensorLayout layout_;
  LayoutAxis axis_;
  std::string name_, dtype_;
  std::vector<int64_t> shape_;
  int64_t layout_position_ = 0;

  using Form = JsonRecord::Form;
  JsonRecord axis_scope_{Form::Object,
                         {{"axis", &axis_.name},
                          {"size", &axis_.size},
                          {"stride", &axis_.stride},
                          {"dim", &axis_.dim},
                          {"only", &axis_.only}},
                         [this] { return add_axis(); }};
  JsonList layout_scope_{axis_scope_, kMaxAxes, [this] { return add_layout(); }};
  JsonList layouts_scope_{layout_scope_, kMaxLayouts};
  JsonNumbers shape_scope_{shape_, kMostDims};
  JsonRecord tensor_scope_{
      Form::Array,
      {{"name", &name_}, {"dtype", &dtype_}, {"shape", &shape_scope_}, {"layout", &layout_position_}},
      [this] { return add_tensor(); }};
  JsonList tensors_scope_{tensor_scope_, kMaxTensors};
  JsonTexts texts_scope_{manifest_.texts, kMaxTexts};
  JsonRecord file_scope_{Form::Array,
                         {{"num_bytes", &file_.num_bytes}, {"header_digest", &file_.header_digest}},
                         [this] { return add_file(); }};
  JsonList files_scope_{file_scope_, kMaxRanks};
  JsonRecord manifest_scope_{Form::Object,
                             {{"run_id", &manifest_.run_id},
                              {"step", &manifest_.step},
                              {"library", &manifest_.library},
                              {"num_threads", &manifest_.num_threads},
                              {"finite", &manifest_.finite},
                              {"config", &manifest_.config},
                              {"texts", &texts_scope_},
                              {"layouts", &layouts_scope_},
                              {"tensors", &tensors_scope_},
                              {"files", &files_scope_}}};
  JsonRecord root_scope_{
      Form::Object, {{"titan_checkpoint", &format_}, {"digest", &digest_}, {"manifest", &manifest_scope_}}};
};

// Removes `expected` from the front of `text`.
bool take(std::string_view& text, std::string_view expected) {
  if (!text.starts_with(expected)) return false;
  text.remove_prefix(expected.size());
  return true;
}

void check_format(std::string_view& text) {
  int64_t format = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), format);
  TITAN_CHECK(error != std::errc() || format <= kFormatVersion, "format ", format,
              ", which is newer than this library's, ", kFormatVersion);
  // Not the number alone: "01" would be read as 1.
  TITAN_CHECK(take(text, std::to_string(kFormatVersion)) && text.starts_with(','),
              "damaged: no format number at byte ", kStart.size());
}

void check_digest(std::string_view text) {
  TITAN_CHECK(take(text, kStart), "not a checkpoint's manifest: it doesn't begin with ", kStart);
  check_format(text);
  TITAN_CHECK(take(text, kBeforeDigest) && text.size() > kDigestDigits, "damaged: the digest is missing");
  const std::string_view digest = text.substr(0, kDigestDigits);
  text.remove_prefix(kDigestDigits);
  TITAN_CHECK(is_digest(digest) && take(text, kAfterDigest),
              "damaged: the digest isn't 32 hexadecimal digits followed by the end of the line");
  TITAN_CHECK(digest == digest_of(text), "damaged: its digest is ", digest, ", but its bytes have ",
              digest_of(text));
}

}  // namespace

std::string file_name(int64_t rank) {
  std::ostringstream name;
  name << "rank_" << std::setw(5) << std::setfill('0') << rank << ".safetensors";
  return name.str();
}

std::string to_text(const Manifest& manifest) {
  check_values(manifest);
  size_t num_text_bytes = manifest.config.size() + manifest.library.size();
  for (const auto& [key, text] : manifest.texts) num_text_bytes += text.size();
  check_size(num_text_bytes);  // before they are copied
  check_files(manifest.files);
  TITAN_CHECK(static_cast<int64_t>(manifest.files.size()) == manifest.table.world_size(), "a manifest with ",
              manifest.files.size(), " files and a table for ", manifest.table.world_size(), " ranks");
  std::string text =
      str("\"manifest\":{\"run_id\":\"", manifest.run_id, "\",\n\"step\":", manifest.step,
          ",\n\"library\":", json_quoted(manifest.library), ",\n\"num_threads\":", manifest.num_threads,
          ",\n\"finite\":", manifest.finite ? "true" : "false",
          ",\n\"config\":", json_quoted(manifest.config), ",\n\"texts\":", text_of(manifest.texts), ",\n",
          table_fields(manifest.table.tensors()), ",\n\"files\":", text_of(manifest.files), "}}\n");
  text.insert(0, str(kStart, kFormatVersion, kBeforeDigest, digest_of(text), kAfterDigest));
  check_size(text.size());
  return text;
}

Manifest parse_manifest(std::string_view text, const std::filesystem::path& path) {
  try {
    check_size(text.size());
    check_digest(text);
    return ManifestReader().read(text);
  } catch (const Error& error) {
    throw Error(str(path.string(), ": ", error.what()));
  }
}

}  // namespace titan::checkpoint
