/* copies.cpp: copies between host and devices.  Those that do not block are queued, as cudaMemcpyAsync()
 * would: the host's side is read or written when they run, if it is pinned; else copies from it take a
 * copy first, and copies to it block. */
#include "torch_parts.h"

#include <torch/library.h>

namespace virtual_device {

namespace {

/* Values, across dtypes and layouts. */
void copy_values(const at::Tensor &to, const at::Tensor &from)
{
    CpuOnly guard;
    to.copy_(from);
}

at::Tensor alias_of(const at::Tensor &t) { return Aliases().of(t); }

/* A CPU tensor of the same memory, without whatever Python knows of it. */
at::Tensor without_python(const at::Tensor &cpu)
{
    return view_like(cpu.storage(), cpu);
}

/* Now, and again by the graph. */
void run_now(Stream *s, const char *name, std::vector<Range> &&ranges, const at::Tensor &to, const at::Tensor &from)
{
    drain(s);
    copy_values(to, from);
    if (s->capture != nullptr) {
        keep_in_graph(s, {name, std::move(ranges), [to, from]() { copy_values(to, from); }});
    }
}

void to_device(const at::Tensor &from, const at::Tensor &to, bool non_blocking)
{
    Stream *s = current_stream(to.device().index());
    const bool pinned = is_pinned(from.unsafeGetTensorImpl()->data());
    std::vector<Range> ranges;

    if (s->capture != nullptr && !(non_blocking && pinned)) {
        refuse_in_capture("to copy from the host");
    }
    const Operation op = begin_copy(s, "copy to device", false, to.nbytes());
    use_tensor(op, to, true, &ranges);
    if (pinned) {
        use_tensor(op, from, false, &ranges);
    }
    const at::Tensor there = alias_of(to);
    if (!non_blocking || s->capture != nullptr) {
        run_now(s, op.name, std::move(ranges), there, pinned ? without_python(from) : from);
    } else {
        CpuOnly guard;
        const at::Tensor source = pinned ? without_python(from) : from.clone();
        queue(s, [there, source]() { copy_values(there, source); });
    }
    if (!non_blocking) {
        synchronise(s);
    }
}

void to_host(const at::Tensor &from, const at::Tensor &to, bool non_blocking)
{
    Stream *s = current_stream(from.device().index());
    const bool later = non_blocking && is_pinned(to.unsafeGetTensorImpl()->data());
    std::vector<Range> ranges;

    if (!later) {
        refuse_in_capture("to copy to the host");
    }
    const Operation op = begin_copy(s, "copy to host", true, from.nbytes());
    use_tensor(op, from, false, &ranges);
    if (is_pinned(to.unsafeGetTensorImpl()->data())) {
        use_tensor(op, to, true, &ranges);
    }
    const at::Tensor here = alias_of(from);
    if (!later || s->capture != nullptr) {
        run_now(s, op.name, std::move(ranges), later ? without_python(to) : to, here);
    } else {
        const at::Tensor target = without_python(to);
        queue(s, [target, here]() { copy_values(target, here); });
    }
    if (!later) {
        synchronise(s);
    }
}

/* Between devices the source's stream copies; both streams wait, before and after. */
void on_device(const at::Tensor &from, const at::Tensor &to)
{
    Stream *s = current_stream(from.device().index()), *other = current_stream(to.device().index());
    std::vector<Range> ranges;

    if (other != s) {
        wait(s, other);
    }
    const Operation op = begin_operation(s, "copy");
    use_tensor(op, from, false, &ranges);
    use_tensor(op, to, true, &ranges);
    Aliases aliases;
    const at::Tensor source = aliases.of(from), target = aliases.of(to);
    run_now(s, op.name, std::move(ranges), target, source);
    if (other != s) {
        wait(other, s);
    }
}

at::Tensor copy_from(const at::Tensor &from, const at::Tensor &to, bool non_blocking)
{
    find_place();
    const at::Tensor source = from.sizes() == to.sizes() ? from : from.expand(to.sizes());

    if (to.numel() == 0 || (is_ours(from) && from.is_same(to))) {
        return to;
    }
    Lock lock;
    if (is_ours(from) && is_ours(to)) {
        on_device(source, to);
    } else if (is_ours(to)) {
        TORCH_CHECK(from.is_cpu(), "Cannot copy from ", from.device(), " to ", to.device());
        to_device(source, to, non_blocking);
    } else {
        TORCH_CHECK(to.is_cpu(), "Cannot copy from ", from.device(), " to ", to.device());
        to_host(source, to, non_blocking);
    }
    return to;
}

at::Tensor copy_from_and_resize(const at::Tensor &from, const at::Tensor &to)
{
    to.resize_(from.sizes());
    return copy_from(from, to, false);
}

}  /* namespace */

}  /* namespace virtual_device */

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m)
{
    m.impl("_copy_from", &virtual_device::copy_from);
    m.impl("_copy_from_and_resize", &virtual_device::copy_from_and_resize);
}

/* A copy takes conjugated and negated tensors as they are; torch's way to resolve them copies. */
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
