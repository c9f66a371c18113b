#include "added_tokens.h"

#include <algorithm>

namespace titan::data {

namespace {

size_t pair_of(char first, char second) {
  return static_cast<size_t>(static_cast<unsigned char>(first)) << 8 | static_cast<unsigned char>(second);
}

}  // namespace

AddedTokens::AddedTokens(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
  std::stable_sort(tokens_.begin(), tokens_.end(),
                   [](const auto& a, const auto& b) { return a.content.size() > b.content.size(); });
  if (tokens_.empty()) return;
  char first = tokens_[0].content[0];
  if (std::all_of(tokens_.begin(), tokens_.end(),
                  [&](const auto& token) { return token.content[0] == first; }))
    only_first_byte_ = static_cast<unsigned char>(first);
  for (const auto& [content, id] : tokens_) {
    if (content.size() > 1)
      begins_.set(pair_of(content[0], content[1]));
    else
      for (int second = 0; second < 256; ++second)
        begins_.set(pair_of(content[0], static_cast<char>(second)));
  }
}

bool AddedTokens::may_begin(std::string_view text, size_t position) const {
  if (position + 1 == text.size()) return true;
  return begins_[pair_of(text[position], text[position + 1])];
}

const AddedToken* AddedTokens::match_at(std::string_view text, size_t position) const {
  for (const auto& token : tokens_)
    if (text.compare(position, token.content.size(), token.content) == 0) return &token;
  return nullptr;
}

const AddedToken* AddedTokens::find(std::string_view text, size_t start, size_t& begin) const {
  if (tokens_.empty()) return nullptr;
  for (size_t position = start; position < text.size(); ++position) {
    if (only_first_byte_ >= 0) {
      position = text.find(static_cast<char>(only_first_byte_), position);
      if (position == text.npos) return nullptr;
    }
    if (!may_begin(text, position)) continue;
    const AddedToken* token = match_at(text, position);
    if (!token) continue;
    begin = position;
    return token;
  }
  return nullptr;
}

}  // namespace titan::data
