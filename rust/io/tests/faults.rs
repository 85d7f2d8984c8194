//! Every operation on a file fails once, or is interrupted once.

mod common;

use std::{
    fs,
    path::Path,
    sync::{LazyLock, Mutex, MutexGuard},
};

use common::{Case, Cut, Part};
use shardwise_io::{
    digest::Digest,
    error::Error,
    faults::{Fault, arm, disarm},
    job::{Job, SourceFile, Wanted},
    run::{Options, Report, run},
};

static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// In memory where the system has such a place: these tests sync at every step.
fn folder() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { tempfile::tempdir_in(memory).unwrap() } else { tempfile::tempdir().unwrap() }
}

const ROWS: i64 = 96;
const COLUMNS: i64 = 1024;

/// Column shards in four files to row shards in two, and a second tensor that stays whole.
fn case() -> Case {
    let columns = |i: i64| Part {
        file: i as usize,
        offset: 16,
        start: vec![0, i * COLUMNS / 4],
        stop: vec![ROWS, (i + 1) * COLUMNS / 4],
        strides: vec![COLUMNS, 4],
    };
    let rows = |i: i64| Part {
        file: i as usize,
        offset: 64,
        start: vec![i * ROWS / 2, 0],
        stop: vec![(i + 1) * ROWS / 2, COLUMNS],
        strides: vec![COLUMNS * 4, 4],
    };
    let whole = |file, offset| Part { file, offset, start: vec![0], stop: vec![300], strides: vec![2] };
    let size = 16 + ROWS * COLUMNS;
    let bytes = |seed: i64, size: i64| (0..size).map(|i| ((i * 31 + seed * 7) ^ (i >> 8)) as u8).collect::<Vec<u8>>();
    Case {
        sources: vec![bytes(0, size), bytes(1, size), bytes(2, size), bytes(3, size + 600)],
        destinations: vec![64 + ROWS / 2 * COLUMNS * 4, 64 + ROWS / 2 * COLUMNS * 4 + 600],
        tensors: vec![
            Cut {
                itemsize: 4,
                shape: vec![ROWS, COLUMNS],
                sources: (0..4).map(columns).collect(),
                destinations: (0..2).map(rows).collect(),
                times: 1,
            },
            Cut {
                itemsize: 2,
                shape: vec![300],
                sources: vec![whole(3, size)],
                destinations: vec![whole(1, 64 + ROWS / 2 * COLUMNS * 4)],
                times: 1,
            },
        ],
    }
}

fn job(case: &Case, folder: &Path) -> Job {
    let wanted = Wanted { digest: true, crc: true };
    let made = folder.join("made");
    fs::create_dir_all(&made).unwrap();
    let sources = (0..case.sources.len()).map(|i| {
        let path = folder.join(format!("source{i}"));
        shardwise_io::job::Source::File(SourceFile { size: case.sources[i].len() as i64, path, ..Default::default() })
    });
    case.job(sources.collect(), case.destinations(&made), wanted)
}

fn run_here(case: &Case, folder: &Path) -> Result<Report, Error> {
    let options = Options { budget: 40_000, threads: Some(1), sync: true };
    run(&job(case, folder), &options, &mut |_, _| Ok(()))
}

/// What the one case must give: the files, the digests and the CRC-32 of the pieces.
type Answers = (Vec<Vec<u8>>, Vec<u128>, [u32; 3]);
static EXPECTED: LazyLock<Answers> = LazyLock::new(|| {
    let (files, half) = (case().expected(), (ROWS / 2 * COLUMNS * 4) as usize);
    let crcs = [&files[0][64..], &files[1][64..64 + half], &files[1][64 + half..]].map(crc32fast::hash);
    (files, case().digests(), crcs)
});

fn check_files(case: &Case, folder: &Path) {
    assert!(case.made(&folder.join("made")) == EXPECTED.0);
}

fn check_report(case: &Case, folder: &Path, report: &Report) {
    check_files(case, folder);
    assert_eq!(report.digests, EXPECTED.1);
    assert_eq!(report.crcs, EXPECTED.2);
}

#[test]
fn an_error_at_any_operation_names_a_file_and_leaves_none() {
    let _turn = turn();
    let (case, mut seen) = (case(), 0);
    for at in 0.. {
        let folder = folder();
        case.prepare(folder.path());
        let before = fs::read_dir(folder.path()).unwrap().count();
        arm(at, Fault::Fail(28)); // ENOSPC
        let done = run_here(&case, folder.path());
        if disarm() <= at {
            check_report(&case, folder.path(), &done.unwrap());
            break;
        }
        seen += 1;
        let message = done.unwrap_err().to_string();
        assert!(message.contains(&*folder.path().to_string_lossy()) && message.contains("No space left"), "{message}");
        assert_eq!(fs::read_dir(folder.path().join("made")).unwrap().count(), 0, "{at}: {message}");
        // The sources are as they were.
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), before + 1);
    }
    assert!(seen > 50, "{seen}");
}

#[test]
fn an_interrupted_call_is_made_again() {
    let _turn = turn();
    let case = case();
    for at in 0.. {
        let folder = folder();
        case.prepare(folder.path());
        arm(at, Fault::Fail(4)); // EINTR
        let report = run_here(&case, folder.path()).unwrap();
        check_report(&case, folder.path(), &report);
        if disarm() <= at {
            break;
        }
    }
}

#[test]
fn digests_do_not_depend_on_the_cut() {
    let case = case();
    let whole = Digest::of(&case.flat(&case.tensors[0]));
    let pieces = case.digests();
    assert_eq!(shardwise_io::digest::sum(pieces[0], pieces[1]), whole);
}
