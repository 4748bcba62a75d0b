#include "sealed_copy.hpp"

#include "tensors.hpp"

#include <ATen/ops/empty.h>

#include <time.h>

#include <algorithm>
#include <cstring>
#include <optional>

namespace ringfence::sim {

namespace {

constexpr double kWeightOfOpening = 0.1;   // of the latest copy in the average
constexpr size_t kSmallestOpening = 16384; // bytes of copies that say something about the speed

using Buffer = std::vector<char>;
using BufferPtr = std::unique_ptr<Buffer>;

// Memory that copies use one after the other.
class Buffers {
  public:
    BufferPtr take(size_t bytes);
    void give(BufferPtr buffer);

  private:
    std::mutex mutex_;
    std::vector<BufferPtr> unused_;
};

BufferPtr Buffers::take(size_t bytes) {
    BufferPtr found;
    {
        std::lock_guard<std::mutex> hold(mutex_);
        auto larger = [](const auto &a, const auto &b) { return a->capacity() < b->capacity(); };
        auto best = std::max_element(unused_.begin(), unused_.end(), larger);
        if (best != unused_.end()) {
            found = std::move(*best);
            unused_.erase(best);
        }
    }
    if (found == nullptr)
        found = std::make_unique<Buffer>();
    found->resize(bytes);
    return found;
}

void Buffers::give(BufferPtr buffer) {
    std::lock_guard<std::mutex> hold(mutex_);
    unused_.push_back(std::move(buffer));
}

struct Corruption {
    int64_t after, position;
};

// Never destroyed: stream threads use it until the process ends.
struct SealedCopies {
    Buffers bounce, host; // shared with the devices; of the host alone
    std::mutex mutex;
    BufferPtr latest; // a bounce buffer
    std::optional<Corruption> corruption;
    std::atomic<int64_t> number{0};
    std::atomic<double> open_seconds{0}; // that the host needs for each byte, an average
};

SealedCopies &sealed_copies() {
    static auto *only = new SealedCopies;
    return *only;
}

// Counts the CPU time until its end as that of cryptography.
class CryptoTime {
  public:
    CryptoTime() : begin_(now()) {}
    ~CryptoTime() { counters.crypto_ns += now() - begin_; }
    CryptoTime(const CryptoTime &) = delete;
    CryptoTime &operator=(const CryptoTime &) = delete;

  private:
    static int64_t now() {
        timespec time;
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
        return time.tv_sec * 1000000000 + time.tv_nsec;
    }
    int64_t begin_;
};

std::string name_of_place(int device) { return device == kHost ? "the host" : "sim:" + std::to_string(device); }

// A copy in its bounce buffer. Each piece has a tag and a nonce of its own, or all bytes have one.
class Sealed {
  public:
    Sealed(Tee &tee, int from, int to, const char *plain, size_t bytes);
    ~Sealed();
    Sealed(const Sealed &) = delete;
    Sealed &operator=(const Sealed &) = delete;

    // Raises if the bounce buffer was changed. The target holds nothing of it then.
    void open(char *plain);

  private:
    template <typename Function> void each_piece(Function function);
    void corrupt_if_asked();

    int from_, to_;
    size_t bytes_, piece_;
    Key &key_;
    int64_t number_;
    uint64_t nonce_;
    BufferPtr buffer_;
};

Sealed::Sealed(Tee &tee, int from, int to, const char *plain, size_t bytes)
    : from_(from), to_(to), bytes_(bytes),
      piece_(tee.settings.parallel_authentication ? tee.settings.piece_bytes : bytes), key_(tee.key(from, to)),
      number_(++sealed_copies().number) {
    auto pieces = (bytes + piece_ - 1) / piece_;
    nonce_ = key_.take_nonces(pieces);
    buffer_ = sealed_copies().bounce.take(bytes + pieces * kTagBytes);
    {
        CryptoTime measured;
        each_piece([&](uint64_t index, const uint64_t(&associated)[4], size_t begin, size_t length, char *tag) {
            key_.seal(nonce_ + index, associated, plain + begin, length, buffer_->data() + begin, tag);
        });
    }
    corrupt_if_asked();
    ++counters.sealed_copies;
    counters.sealed_bytes += static_cast<int64_t>(bytes);
}

Sealed::~Sealed() {
    if (buffer_ == nullptr)
        return;
    {
        std::lock_guard<std::mutex> hold(sealed_copies().mutex);
        std::swap(sealed_copies().latest, buffer_);
    }
    if (buffer_ != nullptr)
        sealed_copies().bounce.give(std::move(buffer_));
}

template <typename Function> void Sealed::each_piece(Function function) {
    for (size_t index = 0, begin = 0; begin < bytes_; ++index, begin += piece_) {
        uint64_t associated[4] = {static_cast<uint64_t>(from_), static_cast<uint64_t>(to_), bytes_, index};
        auto *tag = buffer_->data() + bytes_ + index * kTagBytes;
        function(index, associated, begin, std::min(piece_, bytes_ - begin), tag);
    }
}

void Sealed::open(char *plain) {
    bool right = true;
    {
        CryptoTime measured;
        each_piece([&](uint64_t index, const uint64_t(&associated)[4], size_t begin, size_t length, const char *tag) {
            right = right && key_.open(nonce_ + index, associated, buffer_->data() + begin, length, tag, plain + begin);
        });
    }
    if (right)
        return;
    std::memset(plain, kPoison, bytes_);
    TORCH_CHECK(false, "confidential copy ", number_, " of ", bytes_, " bytes from ", name_of_place(from_), " to ",
                name_of_place(to_), " failed authentication: its bounce buffer was changed");
}

void Sealed::corrupt_if_asked() {
    std::lock_guard<std::mutex> hold(sealed_copies().mutex);
    auto &asked = sealed_copies().corruption;
    if (!asked || asked->after-- > 0)
        return;
    auto size = static_cast<int64_t>(buffer_->size());
    auto position = ((asked->position % size) + size) % size;
    (*buffer_)[static_cast<size_t>(position)] ^= 1;
    asked.reset();
}

// -- bytes of tensors -----------------------------------------------------------------------------------------------

bool is_plain(const at::Tensor &view, at::ScalarType type) {
    return view.scalar_type() == type && view.is_contiguous() && !view.is_conj() && !view.is_neg();
}

// The elements in one row, converted to a type: the tensor itself, or a copy of it.
at::Tensor packed(const at::Tensor &view, at::ScalarType type) {
    if (is_plain(view, type))
        return view;
    auto made = at::empty(view.sizes(), at::TensorOptions().dtype(type).device(at::kCPU));
    made.copy_(view);
    return made;
}

void open_into(Sealed &sealed, const at::Tensor &view, at::ScalarType type) {
    if (is_plain(view, type)) {
        sealed.open(static_cast<char *>(view.mutable_data_ptr()));
        return;
    }
    auto row = at::empty(view.sizes(), at::TensorOptions().dtype(type).device(at::kCPU));
    sealed.open(static_cast<char *>(row.mutable_data_ptr()));
    view.copy_(row);
}

// Ends a copy when its time is over. The bytes arrive not earlier than needed: a reader that does not wait for the copy
// finds old data.
template <typename Function> void arrive(Queue &queue, const Window &window, size_t bytes, Function function) {
    auto &average = sealed_copies().open_seconds;
    auto needed = seconds(average * static_cast<double>(bytes));
    queue.pass_until(window.end - std::min(window.end - window.begin, needed));
    auto begin = Clock::now();
    {
        Working working;
        function();
    }
    if (bytes >= kSmallestOpening) {
        auto each = std::chrono::duration<double>(Clock::now() - begin).count() / static_cast<double>(bytes);
        average = average + (average > 0 ? kWeightOfOpening : 1) * (each - average);
    }
    queue.pass_until(window.end);
    queue.keep_up();
}

std::unique_ptr<Sealed> sealed_now(Tee &tee, int from, int to, const at::Tensor &view, at::ScalarType type) {
    Working working;
    auto row = packed(view, type);
    return std::make_unique<Sealed>(tee, from, to, static_cast<const char *>(row.const_data_ptr()), row.nbytes());
}

// The host decrypts what a device sent and encrypts it for another one. In between it is plaintext in its memory.
void copy_through_host(Queue &queue, Tee &tee, const Place &from, const Place &to, size_t bytes) {
    auto type = from.view.scalar_type();
    auto memory = sealed_copies().host.take(bytes);
    auto down = tee.sealed(from.device, kDown, queue.now(), bytes);
    queue.pass_until(down.begin);
    auto sealed = sealed_now(tee, from.device, kHost, from.view, type);
    arrive(queue, down, bytes, [&] { sealed->open(memory->data()); });
    auto up = tee.sealed(to.device, kUp, queue.now(), bytes);
    queue.pass_until(up.begin);
    {
        Working working;
        sealed = std::make_unique<Sealed>(tee, kHost, to.device, memory->data(), bytes);
    }
    arrive(queue, up, bytes, [&] { open_into(*sealed, to.view, type); });
    sealed_copies().host.give(std::move(memory));
}

} // namespace

void copy_to_or_from_host(Queue &queue, Tee &tee, const Place &from, const Place &to) {
    auto direction = from.device == kHost ? kUp : kDown;
    int device = direction == kUp ? to.device : from.device;
    auto type = (direction == kUp ? from : to).view.scalar_type();
    auto bytes = static_cast<size_t>(to.view.numel()) * c10::elementSize(type);
    if (!tee.settings.confidential) {
        auto window = tee.plain(device, direction, queue.now(), bytes);
        arrive(queue, window, bytes, [&] { move(from.view, to.view); });
        return;
    }
    auto window = tee.sealed(device, direction, queue.now(), bytes);
    queue.pass_until(window.begin);
    auto sealed = sealed_now(tee, from.device, to.device, from.view, type);
    arrive(queue, window, bytes, [&] { open_into(*sealed, to.view, type); });
}

void copy_between_devices(Queue &queue, Tee &tee, const Place &from, const Place &to) {
    auto type = from.view.scalar_type();
    auto bytes = static_cast<size_t>(to.view.numel()) * c10::elementSize(type);
    if (!tee.settings.confidential) {
        auto window = tee.peer(from.device, to.device, queue.now(), bytes);
        arrive(queue, window, bytes, [&] { move(from.view, to.view); });
    } else if (tee.settings.direct) {
        auto first = tee.direct_first(from.device, to.device, queue.now(), bytes);
        queue.pass_until(first.begin);
        auto sealed = sealed_now(tee, from.device, to.device, from.view, type);
        if (!tee.settings.overlap)
            queue.pass_until(first.end);
        auto second = tee.direct_second(to.device, first, queue.now(), bytes);
        arrive(queue, second, bytes, [&] { open_into(*sealed, to.view, type); });
    } else {
        copy_through_host(queue, tee, from, to, bytes);
    }
}

std::vector<char> latest_bounce_buffer() {
    std::lock_guard<std::mutex> hold(sealed_copies().mutex);
    return sealed_copies().latest == nullptr ? std::vector<char>{} : *sealed_copies().latest;
}

void corrupt_bounce(int64_t after, int64_t position) {
    TORCH_CHECK_VALUE(after >= 0, "`after` counts bounce buffers, got ", after);
    std::lock_guard<std::mutex> hold(sealed_copies().mutex);
    sealed_copies().corruption = Corruption{after, position};
}

void spend_nonces(int64_t count) {
    auto tee = current_tee();
    TORCH_CHECK(tee != nullptr, "no TEE is simulated");
    tee->spend_nonces(static_cast<uint64_t>(count));
}

} // namespace ringfence::sim
