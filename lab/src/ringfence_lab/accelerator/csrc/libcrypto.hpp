#ifndef RINGFENCE_SIM_LIBCRYPTO_HPP
#define RINGFENCE_SIM_LIBCRYPTO_HPP

// AES-256-GCM of OpenSSL's libcrypto, which is loaded when it is needed first.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace ringfence::sim {

constexpr size_t kTagBytes = 16;

// Returns what went wrong, or an empty text.
std::string load_libcrypto(const std::string &name);

// A random key. Its nonces count up; one that has used all that SP 800-38D permits is refused.
class Key {
  public:
    Key();
    ~Key();
    Key(const Key &) = delete;
    Key &operator=(const Key &) = delete;

    uint64_t take_nonces(uint64_t count); // returns the first of them
    void spend_nonces(uint64_t count) { next_ += count; }

    // Both take the same associated data of 32 bytes. `open` returns whether the tag is right.
    void seal(uint64_t nonce, const uint64_t (&associated)[4], const char *plain, size_t bytes, char *sealed,
              char *tag) const;
    bool open(uint64_t nonce, const uint64_t (&associated)[4], const char *sealed, size_t bytes, const char *tag,
              char *plain) const;

  private:
    unsigned char bytes_[32];
    std::atomic<uint64_t> next_{0};
};

} // namespace ringfence::sim

#endif
