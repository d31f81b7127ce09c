//! What a .NET thread waits for, as the runtime's own frames say. To the kernel all of the
//! runtime's waits are the same: a futex.
//!
//! Most waits end in a method of `System.Threading`, whose name says what they are. `lock` did not
//! before .NET 10: the helper that compiled code calls for it goes straight into libcoreclr, whose
//! functions have no names. But the runtime has one function through which go all waits a program
//! asked for, and none of its own (`Thread::DoAppropriateWait`, src/coreclr/vm/threads.cpp of
//! dotnet/runtime: a wait that `Thread.Interrupt` can end). It is found by where it stands: in the
//! waits of `Monitor.Wait` and `WaitHandle`, and in no wait of a thread of the runtime's own.
//!
//! From .NET 11 on all of this is managed code: `Monitor`, `Thread` and `WaitHandle` wait in
//! `WaitSubsystem`, which waits in functions of `libSystem.Native` (src/libraries/
//! System.Private.CoreLib/src/System/Threading of dotnet/runtime). There methods say what a wait is
//! for, further out than those that every wait has in common.
//!
//! Where no method says what a wait is for, where the code went into the runtime may: optimised
//! code calls the function that waits itself, and the runtime's file names those functions
//! ([`perfusion_symbolize::wait_functions`]). So does the runtime's own event for a wait for a
//! lock: it is sent from the function that waited, below the helper. Where all those functions are
//! known and none of them was called, a wait through the one function is for a lock, by a helper
//! that has no name.

use super::threads::WaitReason;
use perfusion_model::frame::{FrameKey, ImageId};
use perfusion_symbolize::Symbol;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// Methods that block, by how their names begin, and the word for it. Of a chain of them the
/// outermost counts: the task, not the monitor it waits on inside.
const METHODS: &[(&str, &str)] = &[
    ("System.Threading.Tasks.Task.SpinWait", "task"),
    ("System.Threading.Tasks.Task.SpinThenBlockingWait", "task"),
    ("System.Threading.Tasks.Task.InternalWait", "task"),
    ("System.Threading.Tasks.Task.Wait", "task"),
    ("System.Threading.SemaphoreSlim.Wait", "semaphore"),
    ("System.Threading.ManualResetEventSlim.Wait", "event"),
    ("System.Threading.CountdownEvent.Wait", "event"),
    ("System.Threading.Barrier.", "barrier"),
    ("System.Threading.ReaderWriterLockSlim.", "lock"),
    ("System.Threading.ReaderWriterLock.", "lock"),
    ("System.Threading.Lock.", "lock"),
    ("System.Threading.Monitor.Wait", "condition"),
    ("System.Threading.Monitor.ObjWait", "condition"),
    // Monitor.Wait from .NET 11 on.
    ("System.Threading.Condition.Wait", "condition"),
    ("System.Threading.Monitor.", "lock"),
    ("System.Threading.WaitHandle.", "event"),
    ("System.Threading.Thread.Join", "join"),
    ("System.Threading.Thread.Sleep", "sleep"),
    ("System.Threading.Thread.StartCore", "thread_start"),
    ("System.Threading.Thread.StartInternal", "thread_start"),
    ("System.Threading.LowLevelLifoSemaphore.", "thread_pool"),
    ("System.Threading.LowLevelLock.", "lock"),
    ("System.Threading.WaitSubsystem.Sleep", "sleep"),
    ("System.Threading.WaitSubsystem.ThreadWaitInfo.Sleep", "sleep"),
    ("System.Threading.WaitSubsystem.Wait(", "event"),
    ("System.Threading.WaitSubsystem.WaitableObject.Wait", "event"),
    ("System.GC.", "gc"),
];

/// Methods by which all of those wait.
const MEANS: [&str; 2] = ["Interop.Sys.LowLevelMonitor_", "Interop.Sys.LowLevelFutex_"];

/// Stubs the runtime makes for calls into itself.
const STUB: &str = "IL_STUB";

/// The namespace of such methods.
const NAMESPACE: &str = "System.Threading.";

/// Waits a program asked for: they go through the one function.
const ASKED: &[&str] = &[
    "System.Threading.Monitor.Wait",
    "System.Threading.Monitor.ObjWait",
    "System.Threading.WaitHandle.",
    "System.Threading.Thread.Join",
];

/// Waits that do not, though a method stands behind them.
const NOT_ASKED: &[&str] =
    &["System.Threading.Thread.Sleep", "System.Threading.LowLevelLifoSemaphore."];

/// Managed code that sends the event itself, from .NET 10 on: where it goes into the runtime says
/// nothing about waits.
const SENDERS: &[&str] = &[NAMESPACE, "System.Diagnostics.", STUB];

/// How many functions are remembered of all runtimes together.
const MAX_FUNCTIONS: usize = 10_000;

/// The runtime's part of the stacks of its events for waits for locks.
#[derive(Debug, Default)]
pub struct LockEvents {
    /// A function that a method called, and the method.
    entries: HashSet<(FrameKey, FrameKey)>,
    /// From there to the event.
    inside: HashSet<FrameKey>,
}

impl LockEvents {
    /// Notes an event's stack.
    pub fn note(&mut self, stack: &[FrameKey]) {
        let is_native = |frame: &FrameKey| matches!(frame, FrameKey::Native { .. });
        let Some(method) = stack.iter().position(|frame| !is_native(frame)) else { return };
        let (inside, rest) = stack.split_at(method);
        if let (Some(&entry), Some(&method @ FrameKey::Managed { .. })) =
            (inside.last(), rest.first())
            && self.entries.len() + self.inside.len() + inside.len() < MAX_FUNCTIONS
        {
            self.entries.insert((entry, method));
            self.inside.extend(inside);
        }
    }

    /// All frames noted, whose names [`RuntimeWaits::learn`] needs.
    pub fn frames(&self) -> impl Iterator<Item = FrameKey> {
        let entries = self.entries.iter().flat_map(|&(entry, method)| [entry, method]);
        entries.chain(self.inside.iter().copied())
    }
}

/// Waits of a thread in one place.
#[derive(Clone, Copy)]
pub struct StackWaits<'a> {
    /// The stack of the waits.
    pub stack: &'a [FrameKey],
    /// The reason, as far as the kernel tells.
    pub reason: WaitReason,
    /// The thread that ended them has stopped its process for a collection, then or another time.
    pub by_collector: bool,
    /// For how long.
    pub blocked_ns: f64,
}

/// A native function, by what it is called or where it begins.
type NativeFunction = (ImageId, Arc<str>);

/// The meaning of the runtime's functions, as stacks showed it.
#[derive(Debug, Default)]
pub struct RuntimeWaits {
    /// Functions only waits go through that the program asked for.
    asked: HashSet<NativeFunction>,
    /// Functions that methods call to wait, and the words for what for.
    entries: HashMap<NativeFunction, &'static str>,
    /// Runtimes whose functions for every other wait a program can ask for are known: what remains
    /// is locks.
    complete: HashSet<ImageId>,
    /// Functions only threads go through that a collection holds up.
    held: HashSet<NativeFunction>,
}

impl RuntimeWaits {
    /// Learns from `stacks`, from events for waits for locks, and from the functions of the
    /// runtime's files that wait; all frames have names.
    #[must_use]
    pub fn learn<'a>(
        stacks: impl Iterator<Item = &'a [FrameKey]>,
        locks: &LockEvents,
        wait_functions: &[(FrameKey, &'static str)],
        symbol: impl Fn(FrameKey) -> Arc<Symbol>,
    ) -> Self {
        let waits_itself = |method: FrameKey| {
            let method = symbol(method);
            let sends = |sender: &&str| method.system_name.starts_with(*sender);
            method.unresolved.is_none() && !SENDERS.iter().any(sends)
        };
        let entries = locks.entries.iter().filter(|&&(_, method)| waits_itself(method));
        let entries =
            entries.map(|&(entry, _)| (entry, "lock")).chain(wait_functions.iter().copied());
        let entries: HashMap<NativeFunction, &'static str> =
            entries.filter_map(|(entry, word)| Some((function(entry, &symbol)?, word))).collect();
        let has = |image: ImageId, wanted: &str| {
            entries.iter().any(|((of, _), word)| *of == image && *word == wanted)
        };
        let images: HashSet<ImageId> = entries.keys().map(|(image, _)| *image).collect();
        let complete = images.into_iter().filter(|&image| {
            ["lock", "condition", "join", "event"].iter().all(|word| has(image, word))
        });
        let complete = complete.collect();
        // By runtime: there can be several on a host, each with a function of its own.
        let mut asked: HashMap<(ImageId, NativeFunction), usize> = HashMap::new();
        let mut asked_stacks: HashMap<ImageId, usize> = HashMap::new();
        let mut others: HashSet<NativeFunction> = HashSet::new();
        for stack in stacks {
            if !waits_for_futex(stack, &symbol) {
                continue;
            }
            let functions: HashSet<NativeFunction> = functions(stack, &symbol).collect();
            let method = methods(stack, &symbol).next();
            let begins = |with: &[&str]| {
                method.as_ref().is_some_and(|method| {
                    with.iter().any(|name| method.system_name.starts_with(name))
                })
            };
            if asked.len() + others.len() + functions.len() > MAX_FUNCTIONS {
                break;
            }
            if begins(ASKED) || entered(stack, &entries, &symbol).is_some() {
                let Some(runtime) = runtime(stack) else { continue };
                *asked_stacks.entry(runtime).or_default() += 1;
                for function in functions {
                    *asked.entry((runtime, function)).or_default() += 1;
                }
            } else if method.is_none() || begins(NOT_ASKED) {
                others.extend(functions);
            }
        }
        // A thread can be held up by a collection on its way out of such a wait: what only a few of
        // them go through is not it. And without waits to tell them from, nothing can be told.
        let told_apart: HashSet<ImageId> = others.iter().map(|(image, _)| *image).collect();
        let in_most = |&((runtime, _), times): &(&(ImageId, NativeFunction), &usize)| {
            told_apart.contains(runtime)
                && asked_stacks.get(runtime).is_some_and(|stacks| times * 2 > *stacks)
        };
        // What is on the way to the event is also on the way out of the wait, where a collection
        // can hold a thread up.
        let inside: HashSet<NativeFunction> =
            locks.inside.iter().filter_map(|&frame| function(frame, &symbol)).collect();
        let asked = asked.iter().filter(in_most).map(|((_, function), _)| function);
        let asked =
            asked.filter(|function| !others.contains(*function) && !inside.contains(*function));
        let asked = asked.cloned().collect();
        Self { asked, entries, complete, held: HashSet::new() }
    }

    /// Learns from `waits`, whose frames have names, how the runtime holds up a thread for a
    /// collection. On its way out of a wait a thread is held up inside the method that waited
    /// (`Thread::RareDisablePreemptiveGC`, src/coreclr/vm/threadsuspend.cpp of dotnet/runtime),
    /// which would say the wrong thing. The way there is in waits that began while the process
    /// stood still and that the thread ended which had stopped it, and hardly in others.
    pub fn learn_pauses<'a>(
        &mut self,
        waits: impl Iterator<Item = StackWaits<'a>>,
        symbol: impl Fn(FrameKey) -> Arc<Symbol>,
    ) {
        let (mut held, mut others) =
            (HashMap::<NativeFunction, f64>::new(), HashMap::<NativeFunction, f64>::new());
        for wait in waits {
            if held.len() + others.len() > MAX_FUNCTIONS {
                break;
            }
            // What began then and ended otherwise may be either.
            let of = match (wait.reason.suspended, wait.by_collector) {
                (true, true) => &mut held,
                (false, _) => &mut others,
                (true, false) => continue,
            };
            if waits_for_futex(wait.stack, &symbol) {
                let functions = functions(wait.stack, &symbol);
                functions.for_each(|function| *of.entry(function).or_default() += wait.blocked_ns);
            }
        }
        // Before the runtime's events come nobody tells that it stands still, nor does the task
        // iterator.
        held.retain(|function, held_ns| {
            others.get(function).is_none_or(|others_ns| others_ns < held_ns)
        });
        self.held = held.into_keys().collect();
    }

    /// The word for a wait on a futex with this stack; `None` when the runtime's frames do not say.
    #[must_use]
    pub fn name(
        &self,
        reason: WaitReason,
        stack: &[FrameKey],
        symbol: impl Fn(FrameKey) -> Arc<Symbol>,
    ) -> Option<&'static str> {
        // A method without a name may be any of those below.
        let innermost = methods(stack, &symbol).next()?;
        if reason.suspended
            && functions(stack, &symbol).any(|function| self.held.contains(&function))
        {
            return Some("gc_suspend");
        }
        let mut found = None;
        for method in methods(stack, &symbol) {
            let name = &method.system_name;
            if let Some((_, word)) = METHODS.iter().find(|(method, _)| begins(name, method)) {
                found = Some(*word);
            } else if !begins(name, NAMESPACE) && !MEANS.iter().any(|means| begins(name, means)) {
                break;
            }
        }
        if found.is_none() && innermost.unresolved.is_none() {
            let asked = functions(stack, &symbol).find(|function| self.asked.contains(function));
            found = match (entered(stack, &self.entries, &symbol), asked) {
                // Held up by a collection, on its way into that function or out of it.
                (Some(_), None) if reason.suspended => None,
                (Some(word), _) => Some(word),
                (None, Some((image, _))) => self.complete.contains(&image).then_some("lock"),
                (None, None) => None,
            };
        }
        found.or(reason.suspended.then_some("gc_suspend"))
    }
}

/// Managed frames, innermost first, without the stubs the runtime makes for calls into itself.
fn methods<'a>(
    stack: &'a [FrameKey],
    symbol: &'a impl Fn(FrameKey) -> Arc<Symbol>,
) -> impl Iterator<Item = Arc<Symbol>> + 'a {
    let managed = stack.iter().filter(|frame| matches!(frame, FrameKey::Managed { .. }));
    managed.map(|&frame| symbol(frame)).filter(|method| !method.system_name.starts_with(STUB))
}

/// True when the method's name begins so. Nested types come with either sign.
fn begins(name: &str, with: &str) -> bool {
    let dotted = name.bytes().map(|byte| if byte == b'+' { b'.' } else { byte });
    name.len() >= with.len() && dotted.zip(with.bytes()).all(|(byte, wanted)| byte == wanted)
}

/// The native functions inside the innermost managed frame.
fn functions<'a>(
    stack: &'a [FrameKey],
    symbol: &'a impl Fn(FrameKey) -> Arc<Symbol>,
) -> impl Iterator<Item = NativeFunction> + 'a {
    let inside = stack.iter().take_while(|frame| !matches!(frame, FrameKey::Managed { .. }));
    inside.filter_map(move |&frame| function(frame, symbol))
}

fn function(frame: FrameKey, symbol: &impl Fn(FrameKey) -> Arc<Symbol>) -> Option<NativeFunction> {
    match frame {
        FrameKey::Native { image, .. } => Some((image, Arc::clone(&symbol(frame).system_name))),
        _ => None,
    }
}

/// The image that the innermost managed frame has called.
fn runtime(stack: &[FrameKey]) -> Option<ImageId> {
    let method = stack.iter().position(|frame| matches!(frame, FrameKey::Managed { .. }))?;
    stack.get(..method)?.iter().rev().find_map(|frame| match frame {
        FrameKey::Native { image, .. } => Some(*image),
        _ => None,
    })
}

/// The word for the one of `entries` that the innermost managed frame has called.
fn entered(
    stack: &[FrameKey],
    entries: &HashMap<NativeFunction, &'static str>,
    symbol: &impl Fn(FrameKey) -> Arc<Symbol>,
) -> Option<&'static str> {
    let method = stack.iter().position(|frame| matches!(frame, FrameKey::Managed { .. }))?;
    let called = function(*stack.get(method.checked_sub(1)?)?, symbol)?;
    entries.get(&called).copied()
}

/// `futex_wait` and its callers (kernel/futex/waitwake.c) are in the kernel's part of the stack.
fn waits_for_futex(stack: &[FrameKey], symbol: &impl Fn(FrameKey) -> Arc<Symbol>) -> bool {
    let kernel = stack.iter().take_while(|frame| matches!(frame, FrameKey::Kernel(_)));
    kernel.into_iter().any(|&frame| symbol(frame).name.contains("futex_wait"))
}

#[cfg(test)]
mod tests {
    use super::{LockEvents, RuntimeWaits, StackWaits};
    use crate::threads::{WaitReason, WaitStateKey};
    use perfusion_model::frame::{FrameKey, ImageId, ProcessId};
    use perfusion_symbolize::{Symbol, SymbolModule, Unresolved};
    use std::sync::Arc;

    /// Frames and their names; a name is a frame's index.
    struct Names(Vec<&'static str>);

    impl Names {
        /// A stack, innermost first: `k:` kernel, `n:` native, `m:` native of another runtime, else
        /// managed.
        fn stack(&mut self, names: &[&'static str]) -> Vec<FrameKey> {
            let mut at = |name| {
                let known = self.0.iter().position(|known| *known == name);
                known.unwrap_or_else(|| {
                    self.0.push(name);
                    self.0.len() - 1
                }) as u64
            };
            let frame = |name: &&'static str| match name.split_once(':') {
                Some(("k", _)) => FrameKey::Kernel(at(name)),
                Some(("m", _)) => FrameKey::Native { image: ImageId(2), address: at(name) },
                Some(_) => FrameKey::Native { image: ImageId(1), address: at(name) },
                None => FrameKey::Managed {
                    process: ProcessId(1),
                    start: at(name),
                    generation: 0,
                    offset: None,
                },
            };
            names.iter().map(frame).collect()
        }

        fn symbol(&self, frame: FrameKey) -> Arc<Symbol> {
            let (FrameKey::Kernel(at)
            | FrameKey::Native { address: at, .. }
            | FrameKey::Managed { start: at, .. }) = frame
            else {
                unreachable!("not in these tests")
            };
            let name: Arc<str> = self.0[at as usize].rsplit(':').next().unwrap().into();
            let unresolved = name.starts_with('[').then_some(Unresolved::NotAnswered);
            Arc::new(Symbol {
                system_name: Arc::clone(&name),
                name,
                module: SymbolModule::None,
                function: None,
                unresolved,
            })
        }
    }

    const FUTEX: WaitReason = WaitReason {
        state: WaitStateKey::Interruptible,
        syscall: Some("futex"),
        io: false,
        suspended: false,
    };

    fn word(
        names: &mut Names,
        waits: &RuntimeWaits,
        suspended: bool,
        stack: &[&'static str],
    ) -> Option<&'static str> {
        let stack = names.stack(stack);
        waits.name(WaitReason { suspended, ..FUTEX }, &stack, |frame| names.symbol(frame))
    }

    /// A process of .NET 8: the pool's gate waits, a finalizer, somebody who sleeps, and one who
    /// was held up on his way out of a wait. `complete`: the functions for all sorts of waits are
    /// known.
    fn known(names: &mut Names, complete: bool) -> RuntimeWaits {
        known_beside(names, complete, &[])
    }

    /// Likewise, on a host with these stacks of others.
    fn known_beside(names: &mut Names, complete: bool, beside: &[Vec<FrameKey>]) -> RuntimeWaits {
        let stacks = [
            names.stack(&[
                "k:futex_wait",
                "n:cond_wait",
                "n:pal",
                "n:asked",
                "n:wait_one",
                "System.Threading.WaitHandle.WaitOneNoCheck",
                "Gate",
            ]),
            names.stack(&[
                "k:futex_wait",
                "n:cond_wait",
                "n:pal",
                "n:asked",
                "n:event",
                "n:obj_wait",
                "System.Threading.Monitor.Wait",
                "Mine",
            ]),
            names.stack(&[
                "k:futex_wait",
                "n:cond_wait",
                "n:pal",
                "n:asked",
                "n:event",
                "n:obj_wait",
                "System.Threading.Monitor.Wait",
                "Other",
            ]),
            names.stack(&[
                "k:futex_wait",
                "n:cond_wait",
                "n:pal",
                "n:event",
                "n:rare_disable",
                "System.Threading.Monitor.Wait",
                "Mine",
            ]),
            names.stack(&["k:futex_wait", "n:cond_wait", "n:pal", "n:event", "n:finalizer"]),
            names.stack(&[
                "k:futex_wait",
                "n:cond_wait",
                "n:pal",
                "n:sleep",
                "System.Threading.Thread.Sleep",
                "Mine",
            ]),
        ];
        let words = ["lock", "condition", "join", "event"];
        let functions: Vec<_> = names
            .stack(&["n:reliable_enter", "n:obj_wait", "n:join", "n:wait_one"])
            .into_iter()
            .zip(words.into_iter().take(if complete { 4 } else { 2 }))
            .collect();
        let stacks = stacks.iter().chain(beside).map(Vec::as_slice);
        RuntimeWaits::learn(stacks, &LockEvents::default(), &functions, |frame| names.symbol(frame))
    }

    #[test]
    fn the_outermost_method_that_waits_says_what_for() {
        let mut names = Names(Vec::new());
        let waits = RuntimeWaits::default();
        let mut of = |stack: &[&'static str]| word(&mut names, &waits, false, stack);
        let monitor = "System.Threading.Monitor.Wait";
        assert_eq!(of(&["k:futex_wait", "n:pal", monitor, "Mine"]), Some("condition"));
        let slim = "System.Threading.ManualResetEventSlim.Wait";
        assert_eq!(of(&["k:futex_wait", "n:pal", monitor, slim, "Mine"]), Some("event"));
        let task = [
            "k:futex_wait",
            "n:pal",
            monitor,
            slim,
            "System.Threading.Tasks.Task.InternalWaitCore",
            "Mine",
        ];
        assert_eq!(of(&task), Some("task"));
        assert_eq!(of(&["n:pal", "System.Threading.Monitor.Enter_Slowpath", "Mine"]), Some("lock"));
        let stub = [
            "k:futex_wait",
            "n:pal",
            "IL_STUB_PInvoke",
            "System.Threading.SemaphoreSlim.WaitCore",
            "Mine",
        ];
        assert_eq!(of(&stub), Some("semaphore"));
        // What called the program's own code is not what it waits for.
        assert_eq!(
            of(&[
                "n:pal",
                "System.Threading.Thread.Sleep",
                "Mine",
                "System.Threading.Tasks.Task.Wait"
            ]),
            Some("sleep")
        );
        assert_eq!(of(&["n:pal", "Mine"]), None);
        assert_eq!(of(&["n:pal"]), None);
    }

    #[test]
    fn waits_of_the_managed_wait_subsystem_are_named_by_who_uses_it() {
        let mut names = Names(Vec::new());
        let waits = RuntimeWaits::default();
        let mut of = |methods: &[&'static str]| {
            let inside = [
                "k:futex_wait",
                "n:SystemNative_LowLevelMonitor_Wait",
                "Interop+Sys.LowLevelMonitor_Wait(IntPtr)",
                "System.Threading.WaitSubsystem+ThreadWaitInfo.Wait(Int32, Boolean)",
            ];
            word(&mut names, &waits, false, &[&inside, methods, &["Mine"]].concat())
        };
        let waitable = "System.Threading.WaitSubsystem+WaitableObject.Wait_Locked(Int32)";
        let one = "System.Threading.WaitHandle.WaitOneNoCheck(Int32)";
        let condition = "System.Threading.Condition.Wait(Int32, Object)";
        let lock = "System.Threading.Lock.TryEnterSlow(Int32)";
        let slim = "System.Threading.SemaphoreSlim.WaitCore(Int64)";
        let sleep = "System.Threading.WaitSubsystem+ThreadWaitInfo.Sleep(Int32)";
        assert_eq!(of(&[waitable, one]), Some("event"));
        assert_eq!(of(&[waitable]), Some("event"));
        assert_eq!(of(&[waitable, one, condition]), Some("condition"));
        assert_eq!(of(&[waitable, one, condition, slim]), Some("semaphore"));
        assert_eq!(of(&[waitable, one, lock]), Some("lock"));
        assert_eq!(of(&[waitable, one, lock, "System.Threading.Thread.Join()"]), Some("join"));
        assert_eq!(of(&[sleep]), Some("sleep"));
        assert_eq!(of(&[]), None, "it may be anything");
        let pool = [
            "k:futex_wait",
            "Interop.Sys.LowLevelFutex_WaitOnAddress(Int32*, Int32)",
            "System.Threading.LowLevelThreadBlocker.Wait()",
            "System.Threading.LowLevelLifoSemaphore.WaitForSignal(Int32)",
        ];
        assert_eq!(word(&mut names, &waits, false, &pool), Some("thread_pool"));
        let own = [
            "k:futex_wait",
            "Interop.Sys.LowLevelMonitor_Wait(IntPtr)",
            "System.Threading.LowLevelLock.WaitAndAcquire()",
            "System.Threading.WaitSubsystem.SetEvent(IntPtr)",
            "Mine",
        ];
        assert_eq!(word(&mut names, &waits, false, &own), Some("lock"));
    }

    #[test]
    fn a_wait_the_program_asked_for_without_a_method_is_one_for_a_lock() {
        let mut names = Names(Vec::new());
        let waits = known(&mut names, true);
        let lock =
            ["k:futex_wait", "n:cond_wait", "n:pal", "n:asked", "n:event", "n:enter", "Mine"];
        assert_eq!(word(&mut names, &waits, false, &lock), Some("lock"));
        // It may well begin while a collection goes on.
        assert_eq!(word(&mut names, &waits, true, &lock), Some("lock"));
        let unnamed = ["k:futex_wait", "n:cond_wait", "n:pal", "n:asked", "n:event", "[managed]"];
        assert_eq!(word(&mut names, &waits, false, &unnamed), None);
        // Where a function for another sort of wait may be unknown it may be that.
        let waits = known(&mut names, false);
        assert_eq!(word(&mut names, &waits, false, &lock), None);
    }

    #[test]
    fn each_of_several_runtimes_has_a_function_of_its_own() {
        let mut names = Names(Vec::new());
        let monitor = "System.Threading.Monitor.Wait";
        let theirs = names.stack(&[
            "k:futex_wait",
            "n:cond_wait",
            "m:asked",
            "m:obj_wait",
            monitor,
            "Theirs",
        ]);
        let finalizer = names.stack(&["k:futex_wait", "n:cond_wait", "m:finalizer"]);
        let lock =
            ["k:futex_wait", "n:cond_wait", "n:pal", "n:asked", "n:event", "n:enter", "Mine"];
        let asked = |waits: &RuntimeWaits| {
            [1, 2].map(|image| waits.asked.contains(&(ImageId(image), "asked".into())))
        };
        let mut stacks = vec![theirs; 12];
        let waits = known_beside(&mut names, true, &stacks);
        assert_eq!(word(&mut names, &waits, false, &lock), Some("lock"));
        assert_eq!(asked(&waits), [true, false], "there is nothing of the other's to tell it from");
        stacks.push(finalizer);
        assert_eq!(asked(&known_beside(&mut names, true, &stacks)), [true, true]);
    }

    #[test]
    fn a_wait_whose_method_was_inlined_is_known_by_the_function_that_was_called() {
        let mut names = Names(Vec::new());
        let waits = known(&mut names, true);
        let wait =
            ["k:futex_wait", "n:cond_wait", "n:pal", "n:asked", "n:event", "n:obj_wait", "Mine"];
        assert_eq!(word(&mut names, &waits, false, &wait), Some("condition"));
        let join = ["k:futex_wait", "n:cond_wait", "n:pal", "n:asked", "n:join", "Mine"];
        assert_eq!(word(&mut names, &waits, false, &join), Some("join"));
        let inside = ["k:futex_wait", "n:obj_wait", "System.Threading.SemaphoreSlim.Wait", "Mine"];
        assert_eq!(word(&mut names, &waits, false, &inside), Some("semaphore"));
    }

    #[test]
    fn a_thread_held_up_by_a_collection_is_told_from_one_that_waits_for_a_lock() {
        let mut names = Names(Vec::new());
        let waits = known(&mut names, true);
        let held = ["k:futex_wait", "n:cond_wait", "n:pal", "n:event", "n:rare_disable", "Mine"];
        assert_eq!(word(&mut names, &waits, true, &held), Some("gc_suspend"));
        assert_eq!(word(&mut names, &waits, false, &held), None);
    }

    #[test]
    fn a_thread_held_up_on_its_way_out_of_a_wait_no_longer_waits_for_that() {
        let mut names = Names(Vec::new());
        let mut waits = known(&mut names, true);
        let sleep = "System.Threading.Thread.Sleep";
        let out_of_sleep = [
            "k:futex_wait",
            "n:cond_wait",
            "n:pal",
            "n:event",
            "n:rare_disable",
            "n:sleep",
            sleep,
            "Mine",
        ];
        let asleep = ["k:futex_wait", "n:cond_wait", "n:pal", "n:sleep", sleep, "Mine"];
        let finalizer = ["k:futex_wait", "n:cond_wait", "n:pal", "n:event", "n:finalizer"];
        let locked =
            ["k:futex_wait", "n:cond_wait", "n:pal", "n:asked", "n:event", "n:enter", "Mine"];
        // Began while the process stood still; ended by who had stopped it; for how long.
        type Row<'a> = (&'a [&'static str], bool, bool, f64);
        let mut learn = |waits: &mut RuntimeWaits, rows: &[Row<'_>]| {
            let rows: Vec<_> = rows.iter().map(|row| (names.stack(row.0), row)).collect();
            let rows = rows.iter().map(|(stack, row)| StackWaits {
                stack,
                reason: WaitReason { suspended: row.1, ..FUTEX },
                by_collector: row.2,
                blocked_ns: row.3,
            });
            waits.learn_pauses(rows, |frame| names.symbol(frame));
            [&out_of_sleep[..], &asleep, &locked]
                .map(|stack| word(&mut names, waits, true, stack).unwrap())
        };
        // Nothing to tell it by.
        let nothing: [Row<'_>; 2] =
            [(&asleep, false, false, 9e9), (&out_of_sleep, true, false, 1e6)];
        assert_eq!(learn(&mut waits, &nothing), ["sleep", "sleep", "lock"]);
        // Who begins to sleep while a collection goes on sleeps. Not all of who is held up is known
        // to be.
        let all: [Row<'_>; 5] = [
            (&asleep, false, false, 9e9),
            (&finalizer, false, false, 9e9),
            (&asleep, true, false, 1e6),
            (&out_of_sleep, true, true, 1e6),
            (&out_of_sleep, false, true, 1e5),
        ];
        assert_eq!(learn(&mut waits, &all), ["gc_suspend", "sleep", "lock"]);
        // Who began to wait for a lock then, and got it from the thread that had collected, says
        // nothing against all others.
        let locks: [Row<'_>; 2] = [(&locked, true, true, 1e6), (&locked, false, false, 9e6)];
        assert_eq!(
            learn(&mut waits, &[&all[..], &locks].concat()),
            ["gc_suspend", "sleep", "lock"]
        );
    }

    #[test]
    fn waits_for_locks_are_known_from_the_runtimes_own_events_for_them() {
        let mut names = Names(Vec::new());
        let mut events = LockEvents::default();
        events.note(&names.stack(&[
            "n:shim",
            "n:event_pipe",
            "n:enter_epilog",
            "n:mon_enter",
            "Mine",
            "Main",
        ]));
        // .NET 10 sends the event from managed code.
        events.note(&names.stack(&["n:shim", "n:write", "System.Threading.Lock.Enter", "Mine"]));
        let lock = [
            "k:futex_wait",
            "n:cond_wait",
            "n:pal",
            "n:asked",
            "n:event",
            "n:enter_epilog",
            "n:mon_enter",
            "Mine",
        ];
        let held = [
            "k:futex_wait",
            "n:cond_wait",
            "n:pal",
            "n:event",
            "n:rare_disable",
            "n:enter_epilog",
            "n:mon_enter",
            "Mine",
        ];
        let finalizer = ["k:futex_wait", "n:cond_wait", "n:pal", "n:event", "n:finalizer"];
        let learn = |names: &mut Names, stacks: &[&[&'static str]]| {
            let stacks: Vec<_> = stacks.iter().map(|stack| names.stack(stack)).collect();
            RuntimeWaits::learn(stacks.iter().map(Vec::as_slice), &events, &[], |frame| {
                names.symbol(frame)
            })
        };
        // With waits to tell from: by the function only such waits go through, also while a
        // collection goes on.
        let waits = learn(&mut names, &[&lock, &lock, &held, &finalizer]);
        assert_eq!(word(&mut names, &waits, false, &lock), Some("lock"));
        assert_eq!(word(&mut names, &waits, true, &lock), Some("lock"));
        assert_eq!(word(&mut names, &waits, true, &held), Some("gc_suspend"));
        // Without: by where the method went into the runtime.
        let waits = learn(&mut names, &[&lock]);
        assert_eq!(word(&mut names, &waits, false, &lock), Some("lock"));
        assert_eq!(word(&mut names, &waits, true, &held), Some("gc_suspend"));
        let other = ["k:futex_wait", "n:cond_wait", "n:pal", "n:write", "Mine"];
        assert_eq!(word(&mut names, &waits, false, &other), None);
    }

    #[test]
    fn a_lock_that_nobody_ever_gets_is_known_from_the_function_that_gets_them() {
        let mut names = Names(Vec::new());
        let lock = names.stack(&["k:futex_wait", "n:cond_wait", "n:pal", "n:mon_enter", "Mine"]);
        let functions: Vec<_> =
            names.stack(&["n:mon_enter"]).into_iter().map(|frame| (frame, "lock")).collect();
        let waits = RuntimeWaits::learn(
            std::iter::once(lock.as_slice()),
            &LockEvents::default(),
            &functions,
            |frame| names.symbol(frame),
        );
        let stack = ["k:futex_wait", "n:cond_wait", "n:pal", "n:mon_enter", "Mine"];
        assert_eq!(word(&mut names, &waits, false, &stack), Some("lock"));
        assert_eq!(word(&mut names, &waits, true, &stack), Some("gc_suspend"));
        assert_eq!(
            word(&mut names, &waits, false, &["k:futex_wait", "n:pal", "n:other", "Mine"]),
            None
        );
    }

    #[test]
    fn nothing_is_known_without_waits_to_tell_from() {
        let mut names = Names(Vec::new());
        let gate = names.stack(&[
            "k:futex_wait",
            "n:pal",
            "n:asked",
            "System.Threading.WaitHandle.WaitOne",
            "Gate",
        ]);
        let waits = RuntimeWaits::learn(
            std::iter::once(gate.as_slice()),
            &LockEvents::default(),
            &[],
            |frame| names.symbol(frame),
        );
        assert_eq!(word(&mut names, &waits, false, &["k:futex_wait", "n:pal", "Mine"]), None);
    }
}
