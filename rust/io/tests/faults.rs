//! Every operation on a file fails once, and a killed run goes on: in processes of their own, since the kill is real.

mod common;

use std::{
    fs,
    path::Path,
    process::Command,
    sync::{LazyLock, Mutex, MutexGuard},
};

use common::{Case, Cut, Part};
use shardwise_io::{
    commit,
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
            },
            Cut {
                itemsize: 2,
                shape: vec![300],
                sources: vec![whole(3, size)],
                destinations: vec![whole(1, 64 + ROWS / 2 * COLUMNS * 4)],
            },
        ],
    }
}

fn options(folder: &Path, journal: bool) -> Options {
    let journal = journal.then(|| folder.join("journal"));
    Options { budget: 40_000, threads: Some(1), sync: true, journal, record_every: 1 }
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

fn run_here(case: &Case, folder: &Path, journal: bool) -> Result<Report, Error> {
    run(&job(case, folder), &options(folder, journal), &mut |_, _| Ok(()))
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
        let done = run_here(&case, folder.path(), false);
        if disarm() <= at {
            check_report(&case, folder.path(), &done.unwrap());
            break;
        }
        seen += 1;
        let message = done.unwrap_err().to_string();
        assert!(message.contains(&*folder.path().to_string_lossy()) && message.contains("No space left"), "{message}");
        assert_eq!(fs::read_dir(folder.path().join("made")).unwrap().count(), 0, "{at}: {message}");
        // The journal's folder and the sources are as they were.
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
        let report = run_here(&case, folder.path(), true).unwrap();
        check_report(&case, folder.path(), &report);
        if disarm() <= at {
            break;
        }
    }
}

#[test]
fn a_run_that_failed_goes_on() {
    let _turn = turn();
    let (case, mut resumed) = (case(), 0);
    for at in 0.. {
        let folder = folder();
        case.prepare(folder.path());
        arm(at, Fault::FailAlways(5)); // EIO
        let failed = run_here(&case, folder.path(), true).is_err();
        disarm();
        if !failed {
            break;
        }
        let report = run_here(&case, folder.path(), true).unwrap();
        check_report(&case, folder.path(), &report);
        resumed += i64::from(report.resumed > 0);
    }
    assert!(resumed > 20, "{resumed}");
}

/// Not a test of its own: what a child process of the next test does.
#[test]
fn child() {
    let Ok(folder) = std::env::var("SHARDWISE_TEST_FOLDER") else { return };
    let at = std::env::var("SHARDWISE_TEST_KILL").unwrap().parse().unwrap();
    let (folder, case) = (Path::new(&folder), case());
    arm(at, Fault::Kill);
    let lock = commit::Lock::new(&folder.join("lock")).unwrap();
    let report = run_here(&case, folder, true).unwrap();
    let manifest = report.digests.iter().map(|digest| format!("{digest:032x}\n")).collect::<String>();
    let _ = fs::remove_file(folder.join("manifest.new"));
    commit::write_file(&folder.join("manifest.new"), manifest.as_bytes()).unwrap();
    commit::publish(&folder.join("manifest.new"), &folder.join("manifest"), false).unwrap();
    drop(lock);
    println!("operations {}", disarm());
}

#[test]
fn killed_at_any_operation_it_is_complete_or_goes_on() {
    let _turn = turn();
    let (case, mut kills, mut resumed) = (case(), 0, 0);
    let digests: String = EXPECTED.1.iter().map(|digest| format!("{digest:032x}\n")).collect();
    let mut at = 0;
    loop {
        let folder = folder();
        case.prepare(folder.path());
        let start = |at: i64| {
            let mut child = Command::new(std::env::current_exe().unwrap());
            child.args(["--exact", "child", "--nocapture"]).env("SHARDWISE_TEST_FOLDER", folder.path());
            child.env("SHARDWISE_TEST_KILL", at.to_string()).output().unwrap()
        };
        let first = start(at);
        let manifest = folder.path().join("manifest");
        let complete = || {
            assert_eq!(fs::read_to_string(&manifest).unwrap(), digests);
            check_files(&case, folder.path());
        };
        if first.status.success() {
            complete();
            break;
        }
        kills += 1;
        if manifest.exists() {
            complete();
        } else {
            let second = start(i64::MAX);
            assert!(second.status.success(), "{at}: {}", String::from_utf8_lossy(&second.stderr));
            resumed += 1;
            complete();
        }
        // The sources are untouched.
        for (i, bytes) in case.sources.iter().enumerate() {
            assert_eq!(&fs::read(folder.path().join(format!("source{i}"))).unwrap(), bytes);
        }
        at += 1;
    }
    assert!(kills > 60 && resumed > 50, "{kills} {resumed}");
}

#[test]
fn what_was_done_is_not_done_again() {
    let _turn = turn();
    let (case, folder) = (case(), folder());
    case.prepare(folder.path());
    let (job, mut options) = (job(&case, folder.path()), options(folder.path(), true));
    let mut polls = 0;
    let stopped = run(&job, &options, &mut |done, total| {
        polls += 1;
        if done > total / 2 { Err(Error::Interrupted) } else { Ok(()) }
    });
    assert!(matches!(stopped, Err(Error::Interrupted)));
    // A larger budget changes nothing: the units are those of the journal.
    options.budget = 1 << 20;
    let report = run(&job, &options, &mut |_, _| Ok(())).unwrap();
    check_report(&case, folder.path(), &report);
    assert!(report.resumed > job.bytes().unwrap() / 3, "{}", report.resumed);
    // A third run has nothing to do, and gives the same answers.
    let again = run(&job, &options, &mut |_, _| Ok(())).unwrap();
    check_report(&case, folder.path(), &again);
    assert_eq!((again.resumed, again.traffic), (job.bytes().unwrap(), Default::default()));
    // A file that went away is made again, whatever the journal says.
    fs::remove_file(folder.path().join("made/made1")).unwrap();
    let report = run(&job, &options, &mut |_, _| Ok(())).unwrap();
    check_report(&case, folder.path(), &report);
    // Damage at the end of the journal is the end of it.
    let journal = folder.path().join("journal");
    let mut bytes = fs::read(&journal).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&journal, &bytes).unwrap();
    let report = run(&job, &options, &mut |_, _| Ok(())).unwrap();
    check_report(&case, folder.path(), &report);
    assert!(report.resumed < job.bytes().unwrap());
}

#[test]
fn a_journal_that_is_in_use_is_refused() {
    let _turn = turn();
    let (case, folder) = (case(), folder());
    case.prepare(folder.path());
    let (job, options) = (job(&case, folder.path()), options(folder.path(), true));
    let mut refused = false;
    run(&job, &options, &mut |done, _| {
        if done > 0 && !refused {
            refused = matches!(run(&job, &options, &mut |_, _| Ok(())), Err(Error::Locked { .. }));
        }
        Ok(())
    })
    .unwrap();
    assert!(refused);
}

#[test]
fn the_journal_of_another_job_takes_no_files() {
    let _turn = turn();
    let (case, folder) = (case(), folder());
    case.prepare(folder.path());
    run_here(&case, folder.path(), true).unwrap();
    let mut other = case.clone();
    other.sources[0].push(0);
    other.prepare(folder.path());
    let error = run_here(&other, folder.path(), true).unwrap_err().to_string();
    assert!(error.contains("creating") && error.contains("exists"), "{error}");
    check_files(&case, folder.path());
}

#[test]
fn digests_do_not_depend_on_the_cut() {
    let case = case();
    let whole = Digest::of(&case.flat(&case.tensors[0]));
    let pieces = case.digests();
    assert_eq!(shardwise_io::digest::sum(pieces[0], pieces[1]), whole);
}
