# To be sourced by scripts that define say(). install_packages PACKAGE... installs the Debian packages that are missing.

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

missing_packages() {
  local installed package
  # dpkg-query fails if it doesn't know a package, but still lists the others.
  installed=$(dpkg-query -W -f='${Package} ${db:Status-Status}\n' "$@" 2>/dev/null | awk '$2 == "installed" {print $1}' || true)
  for package in "$@"; do
    grep -qx "$package" <<<"$installed" || echo "$package"
  done
}

install_packages() {
  local missing
  mapfile -t missing < <(missing_packages "$@")
  [ ${#missing[@]} -gt 0 ] || return 0
  if ! command -v apt-get >/dev/null; then
    say "these Debian packages are missing, and there is no apt-get to install them: ${missing[*]}"
    return 1
  fi
  say "installing ${missing[*]}"
  as_root apt-get update -q
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}"
}
