// SPDX-License-Identifier: Apache-2.0
//! Runs every fuzz target on its corpus and on mutations of it.
//!
//! `FUZZ_SECS=600` runs each target for this many seconds, from a random seed; `FUZZ_SEED` repeats a
//! run. If an input ends the process, the last line of the output names the file with the input.
#![expect(unsafe_code, reason = "counts allocated memory")]
#![expect(clippy::print_stdout, reason = "helpers of tests print, too")]
#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeSet;
use std::env;
use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use edl_fuzz::mutate::Mutator;
use edl_fuzz::{TARGETS, Target};

/// Files up to this size are also read with every byte changed, and truncated at every byte.
const SMALL: usize = 160;
/// An input that takes longer than this counts as a hang; even on a busy machine, none does.
const PATIENCE: Duration = Duration::from_secs(60);
/// A larger allocation fails, which ends the process.
const MAX_REQUEST: usize = 1 << 31;

/// Counts the memory in use.
struct Counting;

static IN_USE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn add(n: usize) {
    let now = IN_USE.fetch_add(n, Relaxed) + n;
    PEAK.fetch_max(now, Relaxed);
}

// SAFETY: forwards to the system's allocator; null means that an allocation failed.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() > MAX_REQUEST {
            return std::ptr::null_mut();
        }
        add(layout.size());
        // SAFETY: guaranteed by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if layout.size() > MAX_REQUEST {
            return std::ptr::null_mut();
        }
        add(layout.size());
        // SAFETY: guaranteed by the caller.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        IN_USE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: guaranteed by the caller.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if size > MAX_REQUEST {
            return std::ptr::null_mut();
        }
        add(size);
        IN_USE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: guaranteed by the caller.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

/// Memory is counted for the whole process, so targets run one at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn check(name: &str) {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let target = Target::find(name).unwrap();
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("fuzz-{name}"));
    let (done, progress) = channel();
    println!("input: {}", path.display());
    let shown = path.display();
    let runner = {
        let path = path.clone();
        // The stack of an ordinary thread: too much recursion is found, too.
        thread::spawn(move || run(target, &path, &|| done.send(()).unwrap()))
    };
    loop {
        match progress.recv_timeout(PATIENCE) {
            Ok(()) => {}
            Err(RecvTimeoutError::Timeout) => panic!("`{name}` hangs on {shown}"),
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    let keep = target.corpus();
    assert!(
        runner.join().is_ok(),
        "`{name}` failed on {shown}; fix it and keep the input in {}",
        keep.display()
    );
    fs::remove_file(&path).unwrap();
}

/// Runs the corpus, and mutations of it.
fn run(target: Target, path: &PathBuf, done: &dyn Fn()) {
    let input = File::create(path).unwrap();
    let one = |bytes: &[u8]| {
        // Kept in a file, because a stack overflow or a failed allocation ends the process.
        input.set_len(bytes.len() as u64).unwrap();
        input.write_all_at(bytes, 0).unwrap();
        let before = IN_USE.load(Relaxed);
        PEAK.store(before, Relaxed);
        (target.run)(bytes);
        let used = PEAK.load(Relaxed).saturating_sub(before);
        let limit = target.max_memory(bytes.len());
        let len = bytes.len();
        assert!(
            used <= limit,
            "{len} bytes of input used {used} bytes of memory, more than {limit}"
        );
        done();
    };
    let seeds = seeds(target);
    seeds.iter().for_each(|seed| one(seed));
    for seed in seeds.iter().filter(|seed| seed.len() <= SMALL) {
        (0..seed.len()).for_each(|end| one(&seed[..end]));
        for (at, change) in (0..seed.len()).flat_map(|at| [1, 0x80, 0xff].map(|c| (at, c))) {
            let mut bytes = seed.clone();
            bytes[at] ^= change;
            one(&bytes);
        }
    }
    let number = |name| env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let secs = number("FUZZ_SECS");
    let random = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let seed = number("FUZZ_SEED").unwrap_or_else(|| if secs.is_some() { random() } else { 1 });
    println!("FUZZ_SEED={seed}");
    let mut mutator = Mutator::new(&seeds, seed);
    let start = Instant::now();
    let is_over = |n: u64| match secs {
        Some(secs) => start.elapsed() >= Duration::from_secs(secs),
        None => n >= target.n_mutations,
    };
    for n in 0.. {
        if is_over(n) {
            println!("{n} mutations");
            break;
        }
        one(&mutator.input());
    }
}

/// The files of a target's corpus, in the order of their names.
fn seeds(target: Target) -> Vec<Vec<u8>> {
    let files = fs::read_dir(target.corpus()).unwrap().map(|file| file.unwrap().path());
    let files: BTreeSet<PathBuf> = files.collect();
    files.iter().map(|path| fs::read(path).unwrap()).collect()
}

macro_rules! targets {
    ($($name:ident),* $(,)?) => {
        $(#[test] fn $name() { check(stringify!($name)); })*

        const TESTED: &[&str] = &[$(stringify!($name)),*];
    };
}

targets![
    recordio,
    tfrecord,
    example,
    parquet,
    csv,
    jsonl,
    idx,
    frame,
    stranger,
    relay,
    worker_message,
    ps_message,
    command,
    page,
    applied,
    partition,
    manifest,
    exported,
    dockerfile,
    layer,
    archive,
    registry,
    program,
    job,
    cluster,
    scenario,
];

#[test]
fn every_target_has_a_corpus_and_a_test() {
    assert!(TARGETS.iter().map(|target| target.name).eq(TESTED.iter().copied()));
    for target in TARGETS {
        assert!(seeds(target).len() >= 2, "the corpus `{}` is too small", target.name);
    }
}
