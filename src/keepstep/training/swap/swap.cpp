// A c10d backend whose inner backend can be exchanged while ProcessGroup objects stay the same.
//
// For: re-forming every group of a process in place after a rank was replaced. The user's DDP,
// FSDP and DeviceMesh objects keep the ProcessGroup they hold; only what is under it changes.
// Must never: compile at job start, take the GIL on the hot path, or keep an old backend alive.
//
//   ProcessGroup -> SwapBackend -(Gate::enter)-> inner backend (Gloo, NCCL or Loopback)
//
// Gloo loses an operation whose first write fails because the peer has just died: its waiter would
// wait for the group's timeout. So Gloo's collectives are waited for through a Held, which can be
// ended (lost.py). Not all of them: a reduce-scatter of Gloo's is a work without a future, and
// messages and monitored barriers are waited for inside Gloo.
//
// One Gate per process is shared by all its groups. It counts launches into memory that other
// processes can read, refuses work while the groups are broken, and calls back into Python at
// the two moments of a backward pass that the session asked for, and at no other time.

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/ivalue.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <utility>

// Declared here because autograd's own header costs seconds to parse for this one function.
namespace torch::autograd {
TORCH_API int get_current_graph_task_id();
}

namespace {

using c10d::Backend;
using c10d::Work;
using BackendPtr = c10::intrusive_ptr<Backend>;
using WorkPtr = c10::intrusive_ptr<Work>;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;
using Splits = std::vector<int64_t>;

constexpr int kNoBackward = -1;
constexpr auto kGloo = "gloo";
// So many operations, at least, are looked through for finished ones at once.
constexpr size_t kFlyingLook = 64;

// ---------------------------------------------------------------- the gate

class Gate {
 public:
  explicit Gate(py::object broken_type) : broken_type_(std::move(broken_type)) {}

  // Called before every collective. No lock and no GIL unless broken or inside a backward.
  void enter() {
    check();
    const uint64_t count = launched_.fetch_add(1, std::memory_order_relaxed) + 1;
    if (uint64_t* slot = slot_.load(std::memory_order_acquire)) {
      __atomic_store_n(slot, count, __ATOMIC_RELAXED);
    }
    const int task = torch::autograd::get_current_graph_task_id();
    if (task != kNoBackward) {
      enter_backward(task);
    }
  }

  void check() const {
    if (C10_UNLIKELY(broken_.load(std::memory_order_acquire))) {
      py::gil_scoped_acquire gil;
      PyErr_SetString(
          broken_type_.ptr(),
          "the process groups were aborted and have not been re-formed yet");
      throw py::error_already_set();
    }
  }

  void bind_counter(const py::object& buffer, int64_t offset) {
    Py_buffer view{};
    if (PyObject_GetBuffer(buffer.ptr(), &view, PyBUF_WRITABLE) != 0) {
      throw py::error_already_set();
    }
    char* at = static_cast<char*>(view.buf) + offset;
    const bool fits = offset >= 0 && offset + 8 <= view.len;
    if (!fits || reinterpret_cast<uintptr_t>(at) % 8 != 0) {
      PyBuffer_Release(&view);
      throw py::value_error("the counter needs 8 aligned bytes inside the buffer");
    }
    unbind_counter();
    view_ = view;
    auto* slot = reinterpret_cast<uint64_t*>(at);
    __atomic_store_n(slot, launched_.load(), __ATOMIC_RELAXED);
    slot_.store(slot, std::memory_order_release);
  }

  void unbind_counter() {
    slot_.store(nullptr, std::memory_order_release);
    if (view_.obj != nullptr) {
      PyBuffer_Release(&view_);
      view_ = Py_buffer{};
    }
  }

  void on_backward(py::object fn) {
    on_backward_ = std::move(fn);
    has_on_backward_.store(!on_backward_.is_none());
  }

  void before_nth(uint64_t n, py::object fn) {
    nth_fn_ = std::move(fn);
    nth_.store(nth_fn_.is_none() ? 0 : n);
  }

  void reset_backward() {
    std::lock_guard<std::mutex> lock(tasks_mutex_);
    in_backward_.store(0);
    tasks_.fill(kNoBackward);
    last_task_.store(kNoBackward);
  }

  void set_broken(bool broken) { broken_.store(broken, std::memory_order_release); }
  bool broken() const { return broken_.load(std::memory_order_acquire); }
  uint64_t launched() const { return launched_.load(std::memory_order_relaxed); }
  uint64_t in_backward() const { return in_backward_.load(std::memory_order_relaxed); }

 private:
  void enter_backward(int task) {
    const uint64_t nth = in_backward_.fetch_add(1, std::memory_order_relaxed) + 1;
    if (task != last_task_.load(std::memory_order_acquire) && first_of(task) &&
        has_on_backward_.load()) {
      py::gil_scoped_acquire gil;
      on_backward_();
    }
    if (C10_UNLIKELY(nth == nth_.load(std::memory_order_relaxed))) {
      py::gil_scoped_acquire gil;
      nth_fn_();
    }
    // The callback may have waited through an abort: do not launch into dead sockets.
    check();
  }

  // Re-entrant backwards (checkpointing) alternate between ids, so one last id is not enough.
  bool first_of(int task) {
    std::lock_guard<std::mutex> lock(tasks_mutex_);
    last_task_.store(task, std::memory_order_release);
    for (int seen : tasks_) {
      if (seen == task) {
        return false;
      }
    }
    tasks_[next_task_++ % tasks_.size()] = task;
    return true;
  }

  py::object broken_type_;
  std::atomic<bool> broken_{false};
  std::atomic<uint64_t> launched_{0};
  std::atomic<uint64_t*> slot_{nullptr};
  Py_buffer view_{};

  std::atomic<uint64_t> in_backward_{0};
  std::atomic<uint64_t> nth_{0};
  std::atomic<bool> has_on_backward_{false};
  py::object on_backward_ = py::none();
  py::object nth_fn_ = py::none();

  std::mutex tasks_mutex_;
  std::atomic<int> last_task_{kNoBackward};
  std::array<int, 64> tasks_ = [] {
    std::array<int, 64> ids{};
    ids.fill(kNoBackward);
    return ids;
  }();
  size_t next_task_ = 0;
};

// ---------------------------------------------------------------- work that can be ended

// Follows a collective of the inner backend, and ends before it if it is told to.
class Held final : public Work {
 public:
  Held(WorkPtr inner, const c10::ivalue::Future& theirs)
      : Work(-1, inner->retrieveOpType()),
        inner_(std::move(inner)),
        future_(c10::make_intrusive<c10::ivalue::Future>(theirs.elementType(), theirs.devices())) {}

  // Apart from the constructor: the callback needs a counted reference to this.
  static c10::intrusive_ptr<Held> follow(
      WorkPtr inner, const c10::intrusive_ptr<c10::ivalue::Future>& future) {
    auto held = c10::make_intrusive<Held>(std::move(inner), *future);
    future->addCallback([held](c10::ivalue::Future& theirs) {
      if (held->ended_.exchange(true)) {
        return;
      }
      if (theirs.hasError()) {
        held->future_->setError(theirs.exception_ptr());
        held->finish(theirs.exception_ptr());
      } else {
        held->future_->markCompleted(theirs.constValue(), theirs.storages());
        held->finish();
      }
    });
    return held;
  }

  void end(const std::exception_ptr& error) {
    if (ended_.exchange(true)) {
      return;
    }
    try {
      future_->setError(error);
    } catch (const std::exception&) {
      // Somebody's callback; whoever waits for the work itself is freed all the same.
    }
    finish(error);
  }

  bool ended() const { return ended_.load(); }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

  // Out of our own future: Gloo completes its future before its work.
  Tensors result() override {
    if (future_->completed()) {
      const auto value = future_->value();  // Raises what it ended with.
      if (value.isTensorList()) {
        return value.toTensorVector();
      }
    }
    return inner_->result();
  }
  void synchronize() override {
    inner_->synchronize();
    Work::synchronize();
  }
  int sourceRank() const override { return inner_->sourceRank(); }
  float getDuration() const override { return inner_->getDuration(); }
  uint64_t getSequencenumber() const override { return inner_->getSequencenumber(); }

  // A weak reference, which the swap has, would keep the tensors otherwise.
  void release_resources() override {
    inner_.reset();
    future_.reset();
  }

 private:
  WorkPtr inner_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::atomic<bool> ended_{false};
};

// The work's future; none where the backend's work has none.
c10::intrusive_ptr<c10::ivalue::Future> future_of(Work& work) {
  switch (work.retrieveOpType()) {
    case c10d::OpType::BROADCAST:
    case c10d::OpType::ALLREDUCE:
    case c10d::OpType::ALLREDUCE_COALESCED:
    case c10d::OpType::_ALLREDUCE_SPARSE:
    case c10d::OpType::ALLGATHER:
    case c10d::OpType::_ALLGATHER_BASE:
    case c10d::OpType::ALLGATHER_COALESCED:
    case c10d::OpType::REDUCE:
    case c10d::OpType::GATHER:
    case c10d::OpType::SCATTER:
    case c10d::OpType::ALLTOALL:
    case c10d::OpType::ALLTOALL_BASE:
    case c10d::OpType::BARRIER:
      break;
    default:
      return {};
  }
  try {
    return work.getFuture();
  } catch (const c10::Error&) {
    return {};
  }
}

// ---------------------------------------------------------------- the swap

// The gate first, then a counted reference: a swap in another thread must not free what we call.
#define COLLECTIVE(call)          \
  gate_->enter();                 \
  const Current now = current();  \
  return hold(now, now.inner->call)
#define POINT_TO_POINT(call) \
  gate_->check();            \
  return inner()->call

class SwapBackend final : public Backend {
 public:
  SwapBackend(int rank, int size, std::shared_ptr<Gate> gate, BackendPtr inner)
      : Backend(rank, size), gate_(std::move(gate)), inner_(std::move(inner)) {
    holds_ = inner_->getBackendName() == kGloo;
  }

  BackendPtr inner() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return inner_;
  }

  BackendPtr swap(BackendPtr inner) {
    const bool holds = inner->getBackendName() == kGloo;
    std::lock_guard<std::mutex> lock(mutex_);
    std::swap(inner_, inner);
    holds_ = holds;
    ++number_;
    return inner;
  }

  // Which inner backend this is, counted from the first.
  uint64_t number() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return number_;
  }

  // How many operations of one of them have neither succeeded nor failed.
  size_t flying(uint64_t number) {
    std::vector<HeldPtr> seen;  // Dies after the lock: a destructor may want the interpreter.
    std::lock_guard<std::mutex> lock(mutex_);
    size_t count = 0;
    for (const auto& [of, weak] : flying_) {
      auto held = weak.lock();
      count += of == number && held && !held->ended();
      seen.push_back(std::move(held));
    }
    return count;
  }

  // Frees whoever waits for them, with an error.
  void release(uint64_t number, const std::string& why) {
    std::vector<HeldPtr> left;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (const auto& [of, weak] : flying_) {
        if (of == number) {
          left.push_back(weak.lock());
        }
      }
    }
    const auto error = std::make_exception_ptr(std::runtime_error(why));
    for (const auto& held : left) {
      if (held) {
        held->end(error);
      }
    }
  }

  const std::string getBackendName() const override { return "keepstep"; }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return inner()->getBackendOptions();
  }

  WorkPtr broadcast(Tensors& t, const c10d::BroadcastOptions& o) override {
    COLLECTIVE(broadcast(t, o));
  }
  WorkPtr allreduce(Tensors& t, const c10d::AllreduceOptions& o) override {
    COLLECTIVE(allreduce(t, o));
  }
  WorkPtr allreduce_sparse(Tensors& t, const c10d::AllreduceOptions& o) override {
    COLLECTIVE(allreduce_sparse(t, o));
  }
  WorkPtr allreduce_coalesced(
      Tensors& t, const c10d::AllreduceCoalescedOptions& o) override {
    COLLECTIVE(allreduce_coalesced(t, o));
  }
  WorkPtr reduce(Tensors& t, const c10d::ReduceOptions& o) override {
    COLLECTIVE(reduce(t, o));
  }
  WorkPtr allgather(
      TensorLists& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    COLLECTIVE(allgather(out, in, o));
  }
  WorkPtr _allgather_base(
      at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& o) override {
    COLLECTIVE(_allgather_base(out, in, o));
  }
  WorkPtr allgather_coalesced(
      TensorLists& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    COLLECTIVE(allgather_coalesced(out, in, o));
  }
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    COLLECTIVE(allgather_into_tensor_coalesced(out, in, o));
  }
  WorkPtr gather(TensorLists& out, Tensors& in, const c10d::GatherOptions& o) override {
    COLLECTIVE(gather(out, in, o));
  }
  WorkPtr scatter(Tensors& out, TensorLists& in, const c10d::ScatterOptions& o) override {
    COLLECTIVE(scatter(out, in, o));
  }
  WorkPtr reduce_scatter(
      Tensors& out, TensorLists& in, const c10d::ReduceScatterOptions& o) override {
    COLLECTIVE(reduce_scatter(out, in, o));
  }
  WorkPtr _reduce_scatter_base(
      at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& o) override {
    COLLECTIVE(_reduce_scatter_base(out, in, o));
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& o) override {
    COLLECTIVE(reduce_scatter_tensor_coalesced(out, in, o));
  }
  WorkPtr alltoall_base(
      at::Tensor& out,
      at::Tensor& in,
      Splits& out_splits,
      Splits& in_splits,
      const c10d::AllToAllOptions& o) override {
    COLLECTIVE(alltoall_base(out, in, out_splits, in_splits, o));
  }
  WorkPtr alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& o) override {
    COLLECTIVE(alltoall(out, in, o));
  }
  WorkPtr barrier(const c10d::BarrierOptions& o) override { COLLECTIVE(barrier(o)); }
  void monitoredBarrier(const c10d::BarrierOptions& o, bool all_ranks) override {
    gate_->enter();
    inner()->monitoredBarrier(o, all_ranks);
  }

  WorkPtr send(Tensors& t, int to, int tag) override { POINT_TO_POINT(send(t, to, tag)); }
  WorkPtr recv(Tensors& t, int from, int tag) override { POINT_TO_POINT(recv(t, from, tag)); }
  WorkPtr recvAnysource(Tensors& t, int tag) override { POINT_TO_POINT(recvAnysource(t, tag)); }
  void startCoalescing() override { POINT_TO_POINT(startCoalescing()); }
  WorkPtr endCoalescing() override { POINT_TO_POINT(endCoalescing()); }

  bool supportsCoalescing() const override { return inner()->supportsCoalescing(); }
  bool supportsTimeEstimation() const override { return inner()->supportsTimeEstimation(); }
  // Split children would escape the log, and an abort does not reach them.
  bool supportsSplitting() const override { return false; }
  bool supportsShrinking() const override { return false; }
  bool supportsTensorAlloc(c10::DeviceIndex device) override {
    return inner()->supportsTensorAlloc(device);
  }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    return inner()->allocateTensor(size, options);
  }
  std::shared_ptr<c10::Allocator> getMemAllocator() override {
    return inner()->getMemAllocator();
  }
  std::unordered_map<std::string, uint64_t> getMemoryStats() override {
    return inner()->getMemoryStats();
  }

  void setSequenceNumberForGroup() override { inner()->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override {
    return inner()->getSequenceNumberForGroup();
  }
  void setTimeout(std::chrono::milliseconds timeout) override { inner()->setTimeout(timeout); }
  void registerOnCompletionHook(
      std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override {
    inner()->registerOnCompletionHook(std::move(hook));
  }
  void waitForPendingWorks() override { inner()->waitForPendingWorks(); }
  void enableCollectivesTiming() override { inner()->enableCollectivesTiming(); }
  void eagerConnectSingleDevice(at::Device device) override {
    inner()->eagerConnectSingleDevice(device);
  }
  c10d::ErrorType getError() override { return inner()->getError(); }
  void abort() override { inner()->abort(); }
  void shutdown() override { inner()->shutdown(); }
  void suspend() override { inner()->suspend(); }
  void resume() override { inner()->resume(); }

 private:
  using HeldPtr = c10::intrusive_ptr<Held>;
  using Flying = std::vector<std::pair<uint64_t, c10::weak_intrusive_ptr<Held>>>;

  struct Current {
    BackendPtr inner;
    uint64_t number;
    bool holds;
  };

  Current current() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return {inner_, number_, holds_};
  }

  WorkPtr hold(const Current& now, WorkPtr work) {
    const auto future = now.holds && work ? future_of(*work) : nullptr;
    if (!future) {
      return work;
    }
    auto held = Held::follow(std::move(work), future);
    // Both die after the lock: a destructor may want the interpreter.
    std::vector<HeldPtr> seen;
    Flying over;
    std::lock_guard<std::mutex> lock(mutex_);
    if (flying_.size() >= look_at_) {
      Flying left;
      for (auto& each : flying_) {
        auto known = each.second.lock();
        (known && !known->ended() ? left : over).push_back(std::move(each));
        seen.push_back(std::move(known));
      }
      flying_ = std::move(left);
      look_at_ = std::max(kFlyingLook, 2 * flying_.size());
    }
    flying_.emplace_back(now.number, held);
    return held;
  }

  const std::shared_ptr<Gate> gate_;
  mutable std::mutex mutex_;
  BackendPtr inner_;
  uint64_t number_ = 0;
  bool holds_ = false;
  Flying flying_;
  size_t look_at_ = kFlyingLook;
};

// ---------------------------------------------------------------- the loopback

// DDP reads the tensors out of the future, so unlike torch's fake work it must carry them.
class LoopbackWork final : public Work {
 public:
  explicit LoopbackWork(Tensors out) : out_(std::move(out)) {}
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  void synchronize() override {}
  int sourceRank() const override { return 0; }
  Tensors result() override { return out_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(at::IValue(out_));
    return future;
  }

 private:
  Tensors out_;
};

WorkPtr done(Tensors out) { return c10::make_intrusive<LoopbackWork>(std::move(out)); }

// Peers that do not exist yet, imagined as equal to this rank. Values stay finite and shapes
// right; nothing a loopback computes is ever kept, because state arrives from real replicas.
class Loopback final : public Backend {
 public:
  Loopback(int rank, int size) : Backend(rank, size) {}
  const std::string getBackendName() const override { return "keepstep-loopback"; }

  WorkPtr broadcast(Tensors& t, const c10d::BroadcastOptions&) override { return done(t); }
  WorkPtr allreduce(Tensors& t, const c10d::AllreduceOptions&) override { return done(t); }
  WorkPtr allreduce_sparse(Tensors& t, const c10d::AllreduceOptions&) override {
    return done(t);
  }
  WorkPtr allreduce_coalesced(
      Tensors& t, const c10d::AllreduceCoalescedOptions&) override {
    return done(t);
  }
  WorkPtr reduce(Tensors& t, const c10d::ReduceOptions&) override { return done(t); }

  WorkPtr allgather(
      TensorLists& out, Tensors& in, const c10d::AllgatherOptions&) override {
    for (size_t i = 0; i < out.size(); ++i) {
      fill_each(out[i], in[i]);
    }
    return done(out.empty() ? Tensors{} : out[0]);
  }
  WorkPtr _allgather_base(
      at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions&) override {
    fill_chunks(out, in);
    return done({out});
  }
  WorkPtr allgather_coalesced(
      TensorLists& out, Tensors& in, const c10d::AllgatherOptions&) override {
    for (auto& per_rank : out) {
      for (size_t i = 0; i < in.size(); ++i) {
        fill(per_rank[i], in[i]);
      }
    }
    return done({});
  }
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& out, Tensors& in, const c10d::AllgatherOptions&) override {
    for (size_t i = 0; i < out.size(); ++i) {
      fill_chunks(out[i], in[i]);
    }
    return done(out);
  }
  WorkPtr gather(TensorLists& out, Tensors& in, const c10d::GatherOptions&) override {
    for (size_t i = 0; i < out.size(); ++i) {
      fill_each(out[i], in[i]);
    }
    return done({});
  }
  WorkPtr scatter(Tensors& out, TensorLists& in, const c10d::ScatterOptions&) override {
    for (size_t i = 0; i < out.size(); ++i) {
      in.empty() ? zero(out[i]) : fill(out[i], in[i][rank_]);
    }
    return done(out);
  }
  WorkPtr reduce_scatter(
      Tensors& out, TensorLists& in, const c10d::ReduceScatterOptions&) override {
    for (size_t i = 0; i < out.size(); ++i) {
      fill(out[i], in[i][rank_]);
    }
    return done(out);
  }
  WorkPtr _reduce_scatter_base(
      at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions&) override {
    fill(out, mine(in));
    return done({out});
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& out, Tensors& in, const c10d::ReduceScatterOptions&) override {
    for (size_t i = 0; i < out.size(); ++i) {
      fill(out[i], mine(in[i]));
    }
    return done(out);
  }
  WorkPtr alltoall_base(
      at::Tensor& out,
      at::Tensor& in,
      Splits&,
      Splits&,
      const c10d::AllToAllOptions&) override {
    fill(out, in);
    return done({out});
  }
  WorkPtr alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions&) override {
    for (auto& each : out) {
      fill(each, in[rank_]);
    }
    return done(out);
  }
  WorkPtr send(Tensors& t, int, int) override { return done(t); }
  WorkPtr recv(Tensors& t, int, int) override { return done(t); }
  WorkPtr recvAnysource(Tensors& t, int) override { return done(t); }
  WorkPtr barrier(const c10d::BarrierOptions&) override { return done({}); }
  void monitoredBarrier(const c10d::BarrierOptions&, bool) override {}
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void setTimeout(std::chrono::milliseconds) override {}

 private:
  // Real backends write below autograd's sight; so must we, or views of leaves would refuse.
  static void fill(at::Tensor& out, const at::Tensor& in) {
    at::AutoDispatchBelowAutograd below;
    if (out.sizes() == in.sizes()) {
      out.copy_(in);
      return;
    }
    out.zero_();
    const int64_t n = std::min(out.numel(), in.numel());
    if (n > 0 && out.is_contiguous()) {
      out.view({-1}).narrow(0, 0, n).copy_(in.reshape({-1}).narrow(0, 0, n));
    }
  }
  static void zero(at::Tensor& out) {
    at::AutoDispatchBelowAutograd below;
    out.zero_();
  }
  static void fill_each(Tensors& out, const at::Tensor& in) {
    for (auto& each : out) {
      fill(each, in);
    }
  }
  void fill_chunks(at::Tensor& out, const at::Tensor& in) const {
    at::AutoDispatchBelowAutograd below;
    // FSDP2 gathers from a part of the output itself: copy_ refuses what overlaps.
    out.view({size_, -1}).copy_(in.reshape({1, -1}).clone());
  }
  at::Tensor mine(const at::Tensor& in) const {
    at::AutoDispatchBelowAutograd below;
    return in.reshape({size_, -1})[rank_];
  }
};

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::module::import("torch._C._distributed_c10d");
  py::class_<Gate, std::shared_ptr<Gate>>(m, "Gate")
      // Never destroyed: torch may free the last group after the interpreter is gone, where a
      // Python reference can no longer be dropped. One per process, and it is small.
      .def(py::init([](py::object broken_type) {
        return std::shared_ptr<Gate>(new Gate(std::move(broken_type)), [](Gate*) {});
      }))
      .def("check", &Gate::check)
      .def("bind_counter", &Gate::bind_counter)
      .def("unbind_counter", &Gate::unbind_counter)
      .def("on_backward", &Gate::on_backward)
      .def("before_nth", &Gate::before_nth)
      .def("reset_backward", &Gate::reset_backward)
      .def_property("broken", &Gate::broken, &Gate::set_broken)
      .def_property_readonly("launched", &Gate::launched)
      .def_property_readonly("in_backward", &Gate::in_backward);
  py::class_<SwapBackend, Backend, c10::intrusive_ptr<SwapBackend>>(m, "SwapBackend")
      .def(py::init<int, int, std::shared_ptr<Gate>, BackendPtr>())
      .def("swap", &SwapBackend::swap, py::call_guard<py::gil_scoped_release>())
      .def("number", &SwapBackend::number, py::call_guard<py::gil_scoped_release>())
      .def("flying", &SwapBackend::flying, py::call_guard<py::gil_scoped_release>())
      .def("release", &SwapBackend::release, py::call_guard<py::gil_scoped_release>())
      .def("inner", &SwapBackend::inner, py::call_guard<py::gil_scoped_release>());
  py::class_<Loopback, Backend, c10::intrusive_ptr<Loopback>>(m, "Loopback")
      .def(py::init<int, int>());
}
