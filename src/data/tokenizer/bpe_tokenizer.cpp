#include "data/tokenizer/bpe_tokenizer.h"

#include "core/utf8.h"
#include "data/tokenizer/merges.h"
#include "data/tokenizer/tokenizer_json.h"
#include "titan/core/error.h"

namespace titan::data {

namespace bpe {

struct Context {
  PreTokenizer::Scratch split;
  WordCache cache;
  WordMerger merger;
  std::vector<int32_t> word;
};

namespace {

void encode_word(const Definition& definition, std::string_view word, Context& context,
                 std::vector<int32_t>& ids) {
  if (context.cache.append(word, ids)) return;
  auto& tokens = context.word;
  tokens.clear();
  auto whole = definition.whole_words.find(word);
  if (whole != definition.whole_words.end()) {
    tokens.push_back(whole->second);
  } else {
    for (char byte : word) tokens.push_back(definition.byte_ids[static_cast<unsigned char>(byte)]);
    context.merger.merge(definition.merges, tokens);
  }
  context.cache.remember(word, tokens);
  ids.insert(ids.end(), tokens.begin(), tokens.end());
}

// Appends the ids of the tokens of `added` in `text`, and calls `plain` for the parts between them.
template <class Plain>
void cut_out(const AddedTokens& added, std::string_view text, std::vector<int32_t>& ids, Plain&& plain) {
  size_t done = 0, begin = 0;
  while (const AddedToken* token = added.find(text, done, begin)) {
    plain(text.substr(done, begin - done));
    ids.push_back(token->id);
    done = begin + token->content.size();
  }
  plain(text.substr(done));
}

}  // namespace
}  // namespace bpe

class BpeTokenizer::Lease {
 public:
  explicit Lease(const BpeTokenizer& owner) : owner_(owner) {
    std::lock_guard lock(owner.idle_mutex_);
    if (owner.idle_.empty()) return;
    context_ = std::move(owner.idle_.back());
    owner.idle_.pop_back();
  }
  ~Lease() {
    if (!context_) return;
    std::lock_guard lock(owner_.idle_mutex_);
    owner_.idle_.push_back(std::move(context_));
  }
  bpe::Context& context() {
    if (!context_) context_ = std::make_unique<bpe::Context>();
    return *context_;
  }

 private:
  const BpeTokenizer& owner_;
  std::unique_ptr<bpe::Context> context_;
};

BpeTokenizer::BpeTokenizer(const std::filesystem::path& tokenizer_json)
    : definition_(bpe::read_definition(tokenizer_json)) {}

BpeTokenizer::~BpeTokenizer() = default;

void BpeTokenizer::encode_into(std::string_view text, std::vector<int32_t>& ids) const {
  Lease lease(*this);
  std::string repaired;
  if (valid_utf8_prefix(text) != text.size()) text = repaired = replace_invalid_utf8(text);
  bpe::cut_out(definition_->special_tokens, text, ids, [&](std::string_view part) {
    bpe::cut_out(definition_->normalized_tokens, part, ids,
                 [&](std::string_view plain) { encode_plain(plain, lease.context(), ids); });
  });
}

void BpeTokenizer::encode_plain(std::string_view text, bpe::Context& context,
                                std::vector<int32_t>& ids) const {
  definition_->pre_tokenizer.split(text, context.split, [&](std::string_view word) {
    bpe::encode_word(*definition_, word, context, ids);
  });
}

std::string BpeTokenizer::decode(std::span<const int32_t> ids) const {
  std::string bytes;
  for (int32_t id : ids) {
    TITAN_CHECK(id >= 0 && id < vocab_size(), "token id ", id, " is outside the vocabulary of ",
                vocab_size());
    bytes += definition_->bytes_of_id[id];
  }
  return valid_utf8_prefix(bytes) == bytes.size() ? bytes : replace_invalid_utf8(bytes);
}

int64_t BpeTokenizer::vocab_size() const { return static_cast<int64_t>(definition_->bytes_of_id.size()); }
std::optional<int32_t> BpeTokenizer::bos_id() const { return definition_->bos_id; }
std::optional<int32_t> BpeTokenizer::eos_id() const { return definition_->eos_id; }
std::string BpeTokenizer::fingerprint() const { return definition_->fingerprint; }

}  // namespace titan::data
