/* fallback.cpp: every operator without a kernel of its own runs the CPU's, at the addresses of kernels. */
#include "fallback.h"

#include <torch/library.h>

#include <cstring>
#include <unordered_map>

namespace virtual_device {

namespace {

/* What an operator does, from its schema. */
struct Plan {
    const char       *name;
    std::vector<bool> writes;                            /* by argument */
    bool              is_view = false, draws = false, synchronises = false;
};

const Plan &plan_of(const c10::OperatorHandle &op)
{
    static auto *plans = new std::unordered_map<const c10::FunctionSchema *, Plan>;
    const c10::FunctionSchema &schema = op.schema();
    const auto found = plans->find(&schema);

    if (found != plans->end()) {
        return found->second;
    }
    Plan plan;
    bool takes_generator = false, writes_any = false;
    plan.name = intern(c10::toString(op.operator_name()));
    for (const c10::Argument &a : schema.arguments()) {
        const bool writes = a.alias_info() != nullptr && a.alias_info()->isWrite();
        plan.writes.push_back(writes);
        writes_any |= writes;
        takes_generator |= a.name() == "generator";
    }
    for (const c10::Argument &r : schema.returns()) {
        const bool tensors = r.type()->isSubtypeOf(*c10::TensorType::get())
                             || r.type()->isSubtypeOf(*c10::ListType::ofTensors());
        plan.is_view |= !writes_any && r.alias_info() != nullptr;
        plan.synchronises |= !tensors;
    }
    plan.draws = op.hasTag(at::Tag::nondeterministic_seeded) && !takes_generator;
    plan.synchronises |= op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape);
    return plans->emplace(&schema, std::move(plan)).first->second;
}

/* The CPU's default generator draws what the device's would, for operators that take none. */
class BorrowedGenerator {
public:
    BorrowedGenerator(bool borrow, int device)
    {
        if (borrow) {
            ours = cpu_generator_in(default_generator(device)).get<at::CPUGeneratorImpl>();
            theirs = at::detail::getDefaultCPUGenerator().get<at::CPUGeneratorImpl>();
            swap();
        }
    }
    ~BorrowedGenerator()
    {
        if (ours != nullptr) {
            swap();
        }
    }

private:
    at::CPUGeneratorImpl *ours = nullptr, *theirs = nullptr;

    void swap()
    {
        const at::mt19937 engine = ours->engine();
        const auto f = ours->next_float_normal_sample();
        const auto d = ours->next_double_normal_sample();

        ours->set_engine(theirs->engine());
        ours->set_next_float_normal_sample(theirs->next_float_normal_sample());
        ours->set_next_double_normal_sample(theirs->next_double_normal_sample());
        theirs->set_engine(engine);
        theirs->set_next_float_normal_sample(f);
        theirs->set_next_double_normal_sample(d);
    }
};

/* One call: its arguments for the CPU, and its results for the device. */
class Call {
public:
    Call(const c10::OperatorHandle &op, c10::Stack *stack)
        : op(op), plan(plan_of(op)), arguments(op.schema().arguments()), first(stack->size() - arguments.size())
    {
        given.assign(stack->begin() + (ptrdiff_t)first, stack->end());
        for (const c10::IValue &v : given) {
            each_tensor(v, [&](const at::Tensor &t) {
                device = device < 0 && is_ours(t) ? t.device().index() : device;
            });
        }
        for (size_t i = 0; i < given.size() && device >= 0; i++) {
            each_tensor(given[i], [&](const at::Tensor &t) { check_device(t, i); });
        }
        for (const c10::IValue &v : given) {
            if (device < 0 && v.isDevice() && v.toDevice().type() == DEVICE && v.toDevice().has_index()) {
                device = v.toDevice().index();
            }
        }
        device = device < 0 ? this_thread().device : device;
    }

    void run(c10::Stack *stack)
    {
        if (plan.synchronises) {
            refuse_in_capture(plan.name);
        }
        Stream *s = current_stream(device);
        const Operation started = begin_operation(s, plan.name);
        std::vector<Range> used, *ranges = s->capture != nullptr ? &used : nullptr;
        c10::Stack converted;

        drain(s);
        for (size_t i = 0; i < given.size(); i++) {
            converted.push_back(convert(given[i], i));
            if (!plan.is_view) {
                each_tensor(given[i], [&](const at::Tensor &t) {
                    if (is_ours(t)) {
                        use_tensor(started, t, plan.writes[i], ranges);
                    }
                });
            }
        }
        const c10::Stack kept = ranges != nullptr ? converted : c10::Stack();
        call_cpu(op, &converted, plan.draws, device);
        aliases.put_back_sizes(started);
        stack->resize(first);
        std::vector<std::pair<size_t, at::Tensor>> copied;             /* results by number, as the CPU sees them */
        for (size_t i = 0; i < converted.size(); i++) {
            stack->push_back(convert_result(converted[i], started, ranges, &copied));
        }
        if (ranges != nullptr) {
            keep(s, kept, copied, std::move(used));
        }
        if (plan.synchronises) {
            learn(s->clock);
        }
    }

private:
    const c10::OperatorHandle &op;
    const Plan                &plan;
    const std::vector<c10::Argument> &arguments;
    const size_t               first;
    c10::Stack                 given;
    int                        device = -1;
    Aliases                    aliases;

    template <typename F> static void each_tensor(const c10::IValue &v, F f)
    {
        if (v.isTensor()) {
            f(v.toTensor());
        } else if (v.isTensorList()) {
            for (const at::Tensor &t : v.toTensorVector()) {
                f(t);
            }
        } else if (v.isOptionalTensorList()) {
            for (const std::optional<at::Tensor> &t : v.toOptionalTensorVector()) {
                if (t.has_value()) {
                    f(*t);
                }
            }
        }
    }

    /* Other devices have no part, but scalars and indices may come from the host. */
    void check_device(const at::Tensor &t, size_t argument) const
    {
        const c10::Device mine(DEVICE, (c10::DeviceIndex)device);
        const bool scalar = t.defined() && t.is_cpu() && t.dim() == 0 && !plan.writes[argument];
        const bool index = t.defined() && t.is_cpu() && given[argument].isOptionalTensorList();
        const std::string &name = op.schema().name();

        TORCH_CHECK(!t.defined() || t.device() == mine || scalar || index,
                    "Expected all tensors to be on the same device, but found at least two devices, ", mine, " and ",
                    t.device(), "! (when checking argument for argument ", arguments[argument].name(),
                    " in method wrapper_", name.substr(name.find("::") + 2), ")");
    }

    at::Tensor convert(const at::Tensor &t) { return is_ours(t) ? aliases.of(t) : t; }

    c10::IValue convert(const c10::IValue &v, size_t i)
    {
        if (v.isTensor()) {
            return convert(v.toTensor());
        }
        if (v.isTensorList()) {
            c10::List<at::Tensor> list;
            for (const at::Tensor &t : v.toTensorVector()) {
                list.push_back(convert(t));
            }
            return list;
        }
        if (v.isOptionalTensorList()) {
            c10::List<std::optional<at::Tensor>> list;
            for (const std::optional<at::Tensor> &t : v.toOptionalTensorVector()) {
                list.push_back(t.has_value() ? std::optional<at::Tensor>(convert(*t)) : std::nullopt);
            }
            return list;
        }
        if (v.isDevice()) {
            return c10::Device(c10::DeviceType::CPU);
        }
        if (v.isGenerator()) {
            return cpu_generator_in(v.toGenerator());
        }
        if (v.isNone() && arguments[i].name() == "generator") {
            return cpu_generator_in(default_generator(device));
        }
        return v;
    }

    at::Tensor result(const at::Tensor &cpu, const Operation &started, std::vector<Range> *ranges,
                      std::vector<std::pair<size_t, at::Tensor>> *copied, size_t number)
    {
        if (!cpu.defined() || !cpu.has_storage()) {
            return cpu;
        }
        at::Tensor t = aliases.original(cpu);
        const c10::Storage *storage = aliases.storage(cpu);
        if (t.defined()) {
            return t;
        }
        if (storage != nullptr) {
            return view_like(*storage, cpu);
        }
        t = new_tensor(device, cpu.sizes(), cpu.strides(), cpu.scalar_type());
        drain(current_stream(device));                   /* what fills it */
        at::Tensor there = Aliases().of(t);
        if (t.numel() > 0) {
            memcpy(there.data_ptr(), cpu.data_ptr(), t.storage().nbytes());
            use_tensor(again(started), t, true, ranges);
        }
        copied->push_back({number, there});
        return with_bits_of(cpu, t);
    }

    c10::IValue convert_result(const c10::IValue &v, const Operation &started, std::vector<Range> *ranges,
                               std::vector<std::pair<size_t, at::Tensor>> *copied)
    {
        if (v.isTensor()) {
            return result(v.toTensor(), started, ranges, copied, number++);
        }
        if (v.isTensorList()) {
            c10::List<at::Tensor> list;
            for (const at::Tensor &t : v.toTensorVector()) {
                list.push_back(result(t, started, ranges, copied, number++));
            }
            return list;
        }
        return v;
    }
    size_t number = 0;

    static void call_cpu(const c10::OperatorHandle &op, c10::Stack *stack, bool draws, int device)
    {
        CpuOnly guard;
        BorrowedGenerator borrowed(draws, device);
        op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    }

    /* To run again: the same arguments at the same addresses. */
    void keep(Stream *s, const c10::Stack &args, const std::vector<std::pair<size_t, at::Tensor>> &copied,
              std::vector<Range> &&used) const
    {
        const c10::OperatorHandle handle = op;
        const bool draws = plan.draws;
        const int on = device;

        keep_in_graph(s, {plan.name, std::move(used), [handle, args, copied, draws, on]() {
            c10::Stack stack = args;
            std::vector<at::Tensor> results;
            call_cpu(handle, &stack, draws, on);
            for (const c10::IValue &v : stack) {
                each_tensor(v, [&](const at::Tensor &t) { results.push_back(t); });
            }
            for (const auto &c : copied) {
                if (c.second.numel() > 0) {
                    memcpy(c.second.data_ptr(), results[c.first].data_ptr(), c.second.storage().nbytes());
                }
            }
        }});
    }
};

}  /* namespace */

/* `call` outlives the lock: destroying a tensor may need Python's lock. */
void run_on_cpu(const c10::OperatorHandle &op, c10::Stack *stack)
{
    find_place();
    Call call(op, stack);
    Lock lock;
    call.run(stack);
}

}  /* namespace virtual_device */

TORCH_LIBRARY_IMPL(_, PrivateUse1, m)
{
    m.fallback(torch::CppFunction::makeFromBoxedFunction<&virtual_device::run_on_cpu>());
}
