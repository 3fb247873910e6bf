/* call_faults.c: makes any one call fail that gradckpt._C makes into Python, the allocator or torch.
 *
 * The extension's table of imported functions is found in memory, and the named entries are led through here; so is
 * what it looks up by dlsym(), and pointers that are named one by one.  Others in the process call the functions
 * themselves.  Call number k fails without being made: an exception is set, or, of malloc and its kin, nothing.
 * x86-64, Linux. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MOST = 128 };                   /* stubs, below */

void *call_faults_value;               /* what the failing call returns */
void *call_faults_hit(long n, const void *first, const char *second);
extern char call_faults_stubs[];

static const char *names[MOST];
static void *originals[MOST], *values[MOST];
static enum { GIVEN, NONE, MEMORY } raises[MOST];   /* which exception is set */
static int   count;
static long  calls, failing;           /* so far; which fails, 0: none */
static const char *failed;             /* its name */
static PyObject *error;                /* what it raises */
static unsigned long thread;
static const void *safe[16];           /* callables that do not fail */
static int  nsafe, spare_next;

/* Each stub pushes its number; registers that hold arguments survive. */
__asm__(
    ".text\n"
    ".balign 16\n"
    "call_faults_common:\n"
    "    push %rdi; push %rsi; push %rdx; push %rcx; push %r8; push %r9; push %rax\n"
    "    sub $136, %rsp\n"
    "    movups %xmm0, (%rsp); movups %xmm1, 16(%rsp); movups %xmm2, 32(%rsp); movups %xmm3, 48(%rsp)\n"
    "    movups %xmm4, 64(%rsp); movups %xmm5, 80(%rsp); movups %xmm6, 96(%rsp); movups %xmm7, 112(%rsp)\n"
    "    mov 184(%rsp), %rsi\n"          /* the first argument */
    "    mov 176(%rsp), %rdx\n"          /* the second */
    "    mov 192(%rsp), %rdi\n"
    "    call call_faults_hit@PLT\n"
    "    mov %rax, %r11\n"
    "    movups (%rsp), %xmm0; movups 16(%rsp), %xmm1; movups 32(%rsp), %xmm2; movups 48(%rsp), %xmm3\n"
    "    movups 64(%rsp), %xmm4; movups 80(%rsp), %xmm5; movups 96(%rsp), %xmm6; movups 112(%rsp), %xmm7\n"
    "    add $136, %rsp\n"
    "    pop %rax; pop %r9; pop %r8; pop %rcx; pop %rdx; pop %rsi; pop %rdi\n"
    "    add $8, %rsp\n"
    "    test %r11, %r11\n"
    "    je 1f\n"
    "    jmp *%r11\n"
    "1:  mov call_faults_value@GOTPCREL(%rip), %rax\n"
    "    mov (%rax), %rax\n"
    "    ret\n"
    ".globl call_faults_stubs\n"
    ".balign 16\n"
    "call_faults_stubs:\n"
    ".set number, 0\n"
    ".rept 128\n"
    "    .balign 16\n"
    "    pushq $number\n"
    "    jmp call_faults_common\n"
    "    .set number, number + 1\n"
    ".endr\n");

void *call_faults_hit(long n, const void *first, const char *second)
{
    /* Elsewhere, without the GIL, or with an exception under way: not ours to fail. */
    if (failing == 0 || !PyGILState_Check() || PyThread_get_thread_ident() != thread || PyErr_Occurred() != NULL) {
        return originals[n];
    }
    /* These take something back, too. */
    if (spare_next || (strcmp(names[n], "PyObject_CallMethod") == 0
                       && (strcmp(second, "__exit__") == 0 || strcmp(second, "close") == 0))) {
        spare_next = 0;
        return originals[n];
    }
    if (strcmp(names[n], "PyObject_GetAttrString") == 0 && strcmp(second, "exit_mode") == 0) {
        spare_next = 1;
        return originals[n];
    }
    for (int i = 0; i < nsafe; i++) {
        if (first == safe[i]) {
            return originals[n];
        }
    }
    if (++calls != failing) {
        return originals[n];
    }
    failed = names[n];
    call_faults_value = values[n];
    if (raises[n] == GIVEN) {
        PyErr_SetObject((PyObject *)Py_TYPE(error), error);
        PyType_ClearCache();           /* so that what is looked up with the error set fails */
    } else if (raises[n] == MEMORY) {
        PyErr_NoMemory();
    }
    return NULL;
}

/* From now on call number k fails, counted from here; a k beyond all counts.  raised: an exception. */
void call_faults_begin(long k, PyObject *raised)
{
    error = raised;
    thread = PyThread_get_thread_ident();
    calls = 0;
    failed = NULL;
    failing = k;
}

void call_faults_spare(PyObject *callable) { safe[nsafe++] = callable; }

/* The calls that were made. */
long call_faults_end(void)
{
    failing = 0;
    return calls;
}

const char *call_faults_name(void) { return failed; }

/* Python before 3.13 has _NAME_SizeT for NAME. */
static int is_called(const char *symbol, const char *name)
{
    const size_t length = strlen(name);

    return strcmp(symbol, name) == 0
           || (symbol[0] == '_' && strncmp(symbol + 1, name, length) == 0 && strcmp(symbol + 1 + length, "_SizeT") == 0);
}

static void lead(void **slot, void *to)
{
    const long page = sysconf(_SC_PAGESIZE);

    mprotect((void *)((uintptr_t)slot & -(uintptr_t)page), (size_t)page, PROT_READ | PROT_WRITE);
    *slot = to;
}

/* dlsym(), which gives a stub for what is named. */
static void *look_up(void *library, const char *name)
{
    void *found = dlsym(library, name);

    for (int n = 0; n < count && found != NULL; n++) {
        if (strcmp(name, names[n]) == 0) {
            originals[n] = found;
            return call_faults_stubs + 16 * n;
        }
    }
    return found;
}

static void redirect(const ElfW(Rela) *table, size_t size, const ElfW(Sym) *symbols, const char *strings, ElfW(Addr) base)
{
    for (size_t i = 0; i < size / sizeof *table; i++) {
        const unsigned long type = ELF64_R_TYPE(table[i].r_info);
        const char *symbol = strings + symbols[ELF64_R_SYM(table[i].r_info)].st_name;
        void **slot = (void **)(base + table[i].r_offset);
        if (type != R_X86_64_JUMP_SLOT && type != R_X86_64_GLOB_DAT) {
            continue;
        }
        if (strcmp(symbol, "dlsym") == 0) {
            lead(slot, look_up);
        }
        for (int n = 0; n < count; n++) {
            if (is_called(symbol, names[n])) {
                originals[n] = *slot;
                lead(slot, call_faults_stubs + 16 * n);
            }
        }
    }
}

static int visit(struct dl_phdr_info *info, size_t size, void *path)
{
    const ElfW(Rela) *plt = NULL, *rela = NULL;
    const ElfW(Sym) *symbols = NULL;
    const char *strings = NULL;
    size_t plt_size = 0, rela_size = 0;

    (void)size;
    if (strcmp(info->dlpi_name, path) != 0) {
        return 0;
    }
    for (int i = 0; i < info->dlpi_phnum; i++) {
        if (info->dlpi_phdr[i].p_type != PT_DYNAMIC) {
            continue;
        }
        for (const ElfW(Dyn) *d = (void *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr); d->d_tag != DT_NULL; d++) {
            plt = d->d_tag == DT_JMPREL ? (void *)d->d_un.d_ptr : plt;
            plt_size = d->d_tag == DT_PLTRELSZ ? d->d_un.d_val : plt_size;
            rela = d->d_tag == DT_RELA ? (void *)d->d_un.d_ptr : rela;
            rela_size = d->d_tag == DT_RELASZ ? d->d_un.d_val : rela_size;
            symbols = d->d_tag == DT_SYMTAB ? (void *)d->d_un.d_ptr : symbols;
            strings = d->d_tag == DT_STRTAB ? (void *)d->d_un.d_ptr : strings;
        }
    }
    redirect(plt, plt_size, symbols, strings, info->dlpi_addr);
    redirect(rela, rela_size, symbols, strings, info->dlpi_addr);
    return 1;
}

/* Functions by what they return when they fail: NULL (0) or -1 with an exception, NULL alone, 1 alone.  Each list ends
 * with NULL.  How many of them the module imports. */
int call_faults_install(const char *path, const char *const *null, const char *const *minus, const char *const *memory,
                        const char *const *one)
{
    const char *const *const lists[] = {null, minus, memory, one};
    int found = 0;

    for (int k = 0; k < 4; k++) {
        for (const char *const *name = lists[k]; *name != NULL && count < MOST; name++) {
            values[count] = k == 1 ? (void *)-1 : k == 3 ? (void *)1 : NULL;
            raises[count] = k < 2 ? GIVEN : NONE;
            names[count++] = strdup(*name);
        }
    }
    dl_iterate_phdr(visit, (void *)path);
    for (int n = 0; n < count; n++) {
        found += originals[n] != NULL;
    }
    return found;
}

/* A function that is called by a pointer at this place: it fails with -1 and MemoryError. */
void call_faults_pointer(void **slot, const char *name)
{
    names[count] = strdup(name);
    originals[count] = *slot;
    values[count] = (void *)-1;
    raises[count] = MEMORY;
    lead(slot, call_faults_stubs + 16 * count++);
}
