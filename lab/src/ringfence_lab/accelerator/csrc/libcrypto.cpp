#include "libcrypto.hpp"

#include <c10/util/Exception.h>

#include <dlfcn.h>
#include <string.h>

#include <algorithm>
#include <memory>
#include <mutex>

namespace ringfence::sim {

namespace {

constexpr uint64_t kMostNonces = uint64_t(1) << 32; // of one key
constexpr size_t kLargestUpdate = size_t(1) << 30;  // lengths are of type int

// Declared as in OpenSSL 3's <openssl/evp.h> and <openssl/rand.h>, whose headers need not be installed.
constexpr int kSetIvLength = 0x9, kGetTag = 0x10, kSetTag = 0x11;

struct Libcrypto {
    void *(*EVP_CIPHER_CTX_new)() = nullptr;
    void (*EVP_CIPHER_CTX_free)(void *) = nullptr;
    const void *(*EVP_aes_256_gcm)() = nullptr;
    int (*EVP_CIPHER_CTX_ctrl)(void *, int, int, void *) = nullptr;
    int (*EVP_EncryptInit_ex)(void *, const void *, void *, const unsigned char *, const unsigned char *) = nullptr;
    int (*EVP_EncryptUpdate)(void *, unsigned char *, int *, const unsigned char *, int) = nullptr;
    int (*EVP_EncryptFinal_ex)(void *, unsigned char *, int *) = nullptr;
    int (*EVP_DecryptInit_ex)(void *, const void *, void *, const unsigned char *, const unsigned char *) = nullptr;
    int (*EVP_DecryptUpdate)(void *, unsigned char *, int *, const unsigned char *, int) = nullptr;
    int (*EVP_DecryptFinal_ex)(void *, unsigned char *, int *) = nullptr;
    int (*RAND_bytes)(unsigned char *, int) = nullptr;
    std::atomic<bool> loaded{false};
};

Libcrypto &libcrypto() {
    static auto *only = new Libcrypto;
    return *only;
}

const Libcrypto &loaded_libcrypto() {
    TORCH_CHECK(libcrypto().loaded, "libcrypto is not loaded: call ringfence_lab.accelerator.simulate_tee");
    return libcrypto();
}

struct Cipher {
    const Libcrypto &library = loaded_libcrypto();
    std::unique_ptr<void, void (*)(void *)> context{library.EVP_CIPHER_CTX_new(), library.EVP_CIPHER_CTX_free};

    void check(int result, const char *what) const { TORCH_CHECK(result == 1, "OpenSSL's ", what, " failed"); }
};

struct Nonce {
    unsigned char bytes[12] = {};

    explicit Nonce(uint64_t count) {
        for (int index = 11; index >= 4; --index, count >>= 8)
            bytes[index] = static_cast<unsigned char>(count);
    }
};

const unsigned char *input(const void *data) { return static_cast<const unsigned char *>(data); }
unsigned char *output(void *data) { return static_cast<unsigned char *>(data); }

} // namespace

std::string load_libcrypto(const std::string &name) {
    static std::mutex mutex;
    std::lock_guard<std::mutex> hold(mutex);
    auto &found = libcrypto();
    if (found.loaded)
        return "";
    void *library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr)
        return dlerror();
    const char *missing = nullptr;
    auto find = [&](auto &function, const char *symbol) {
        function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, symbol));
        if (function == nullptr)
            missing = symbol;
    };
    find(found.EVP_CIPHER_CTX_new, "EVP_CIPHER_CTX_new");
    find(found.EVP_CIPHER_CTX_free, "EVP_CIPHER_CTX_free");
    find(found.EVP_aes_256_gcm, "EVP_aes_256_gcm");
    find(found.EVP_CIPHER_CTX_ctrl, "EVP_CIPHER_CTX_ctrl");
    find(found.EVP_EncryptInit_ex, "EVP_EncryptInit_ex");
    find(found.EVP_EncryptUpdate, "EVP_EncryptUpdate");
    find(found.EVP_EncryptFinal_ex, "EVP_EncryptFinal_ex");
    find(found.EVP_DecryptInit_ex, "EVP_DecryptInit_ex");
    find(found.EVP_DecryptUpdate, "EVP_DecryptUpdate");
    find(found.EVP_DecryptFinal_ex, "EVP_DecryptFinal_ex");
    find(found.RAND_bytes, "RAND_bytes");
    if (missing != nullptr)
        return std::string("it has no ") + missing;
    found.loaded = true;
    return "";
}

Key::Key() { TORCH_CHECK(loaded_libcrypto().RAND_bytes(bytes_, sizeof bytes_) == 1, "OpenSSL's RAND_bytes failed"); }

Key::~Key() { explicit_bzero(bytes_, sizeof bytes_); }

uint64_t Key::take_nonces(uint64_t count) {
    auto first = next_.fetch_add(count);
    TORCH_CHECK(first + count <= kMostNonces, "a key of the simulated TEE has encrypted ", kMostNonces,
                " times, which is the most that AES-GCM permits: call simulate_tee again before that, for new keys");
    return first;
}

void Key::seal(uint64_t nonce, const uint64_t (&associated)[4], const char *plain, size_t bytes, char *sealed,
               char *tag) const {
    Cipher cipher;
    const auto &library = cipher.library;
    auto *context = cipher.context.get();
    Nonce iv(nonce);
    int written = 0;
    cipher.check(library.EVP_EncryptInit_ex(context, library.EVP_aes_256_gcm(), nullptr, nullptr, nullptr), "cipher");
    cipher.check(library.EVP_CIPHER_CTX_ctrl(context, kSetIvLength, sizeof iv.bytes, nullptr), "nonce length");
    cipher.check(library.EVP_EncryptInit_ex(context, nullptr, nullptr, bytes_, iv.bytes), "key");
    cipher.check(library.EVP_EncryptUpdate(context, nullptr, &written, input(associated), sizeof associated), "data");
    for (size_t done = 0; done < bytes; done += kLargestUpdate) {
        auto length = static_cast<int>(std::min(kLargestUpdate, bytes - done));
        cipher.check(library.EVP_EncryptUpdate(context, output(sealed + done), &written, input(plain + done), length),
                     "encryption");
    }
    cipher.check(library.EVP_EncryptFinal_ex(context, output(tag), &written), "encryption");
    cipher.check(library.EVP_CIPHER_CTX_ctrl(context, kGetTag, kTagBytes, tag), "tag");
}

bool Key::open(uint64_t nonce, const uint64_t (&associated)[4], const char *sealed, size_t bytes, const char *tag,
               char *plain) const {
    Cipher cipher;
    const auto &library = cipher.library;
    auto *context = cipher.context.get();
    Nonce iv(nonce);
    int written = 0;
    unsigned char none[kTagBytes];
    cipher.check(library.EVP_DecryptInit_ex(context, library.EVP_aes_256_gcm(), nullptr, nullptr, nullptr), "cipher");
    cipher.check(library.EVP_CIPHER_CTX_ctrl(context, kSetIvLength, sizeof iv.bytes, nullptr), "nonce length");
    cipher.check(library.EVP_DecryptInit_ex(context, nullptr, nullptr, bytes_, iv.bytes), "key");
    cipher.check(library.EVP_DecryptUpdate(context, nullptr, &written, input(associated), sizeof associated), "data");
    for (size_t done = 0; done < bytes; done += kLargestUpdate) {
        auto length = static_cast<int>(std::min(kLargestUpdate, bytes - done));
        cipher.check(library.EVP_DecryptUpdate(context, output(plain + done), &written, input(sealed + done), length),
                     "decryption");
    }
    cipher.check(library.EVP_CIPHER_CTX_ctrl(context, kSetTag, kTagBytes, const_cast<char *>(tag)), "tag");
    return library.EVP_DecryptFinal_ex(context, none, &written) == 1;
}

} // namespace ringfence::sim
