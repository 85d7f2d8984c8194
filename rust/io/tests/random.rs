//! Random boxes from random files to random files, against a loop over bytes.

mod common;

use std::sync::{Mutex, MutexGuard};

use common::{Case, cases};
use proptest::prelude::*;
use shardwise_io::{
    digest::sum,
    faults::{Fault, arm, disarm},
    job::{Destination, Job, Memory, Source, SourceFile, Wanted},
    run::{Options, run},
};

/// The faults are the process's.
static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn options(budget: i64, threads: usize) -> Options {
    Options { budget, threads: Some(threads), ..Options::default() }
}

/// Runs a case and gives the report, having compared the bytes.
fn check(case: &Case, wanted: Wanted, options: &Options) -> shardwise_io::run::Report {
    let folder = tempfile::tempdir().unwrap();
    let job = case.job(case.prepare(folder.path()), case.destinations(folder.path()), wanted);
    let (mut last, mut total) = (0, 0);
    let report = run(&job, options, &mut |done, all| {
        assert!(last <= done && done <= all);
        (last, total) = (done, all);
        Ok(())
    });
    assert_eq!(last, total);
    assert_eq!(case.made(folder.path()), case.expected());
    report.unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn bytes_are_those_of_a_naive_loop(case in cases(9), budget in 16_384..100_000_i64) {
        let _turn = turn();
        check(&case, Wanted::default(), &options(budget, 1));
    }

    #[test]
    fn digests_are_those_of_the_definition(case in cases(9)) {
        let _turn = turn();
        let report = check(&case, Wanted { digest: true, crc: false }, &options(16_384, 1));
        prop_assert_eq!(report.digests, case.digests());
    }

    #[test]
    fn short_reads_and_writes_change_nothing(case in cases(6)) {
        let _turn = turn();
        arm(0, Fault::Short);
        check(&case, Wanted::default(), &options(16_384, 1));
        disarm();
    }

    #[test]
    fn arrays_are_read_and_written_like_files(case in cases(8), digest in any::<bool>()) {
        let _turn = turn();
        let folder = tempfile::tempdir().unwrap();
        let mut from = case.sources.clone();
        let mut to: Vec<Vec<u8>> = case.destinations.iter().map(|&size| vec![0; size as usize]).collect();
        // SAFETY: the vectors outlive the job and are not touched until it is done.
        let memory = |bytes: &mut Vec<u8>| unsafe { Memory::new(bytes.as_mut_ptr(), 0, bytes.len() as i64) };
        let sources: Vec<_> = from.iter_mut().map(|bytes| Source::Memory(memory(bytes))).collect();
        let destinations: Vec<_> = to.iter_mut().map(|bytes| Destination::Memory(memory(bytes))).collect();
        let wanted = Wanted { digest, crc: false };
        let jobs = [
            case.job(sources, case.destinations(folder.path()), wanted),
            case.job(case.prepare(folder.path()), destinations, wanted),
        ];
        for job in &jobs {
            let report = run(job, &options(16_384, 1), &mut |_, _| Ok(())).unwrap();
            prop_assert!(!digest || report.digests == case.digests());
        }
        prop_assert_eq!(case.made(folder.path()), case.expected());
        prop_assert_eq!(to, case.expected());
    }

    #[test]
    fn a_comparison_names_the_first_element_that_differs(case in cases(6), flip in any::<prop::sample::Index>()) {
        let _turn = turn();
        let folder = tempfile::tempdir().unwrap();
        let expected = case.expected();
        let whole: Vec<(usize, usize)> = case.tensors.iter().enumerate()
            .flat_map(|(t, tensor)| (0..tensor.destinations.len()).map(move |d| (t, d))).collect();
        let (number, (t, d)) = { let i = flip.index(whole.len()); (i, whole[i]) };
        let (tensor, part) = (&case.tensors[t], &case.tensors[t].destinations[d]);
        // Flips two elements of the piece, of which the first in C order must be named.
        let held: Vec<usize> = common::indices(&tensor.shape).iter().enumerate()
            .filter(|(_, at)| part.holds(at)).map(|(i, _)| i).collect();
        let mut files = expected;
        let mut first = Vec::new();
        if !held.is_empty() {
            let (a, b) = (held[flip.index(held.len())], held[held.len() - 1]);
            for element in if a == b { vec![a] } else { vec![a, b] } {
                files[part.file][part.byte(&common::indices(&tensor.shape)[element])] ^= 1;
            }
            first.push((number, a as i64));
        }
        let compared = files.iter().enumerate().map(|(i, bytes)| {
            let path = folder.path().join(format!("other{i}"));
            std::fs::write(&path, bytes).unwrap();
            Destination::Compared(SourceFile { path, size: bytes.len() as i64, ..Default::default() })
        });
        let job = case.job(case.prepare(folder.path()), compared.collect(), Wanted::default());
        let report = run(&job, &options(16_384, 1), &mut |_, _| Ok(())).unwrap();
        prop_assert_eq!(report.differences, first);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn long_runs(mut case in cases(6), threads in 1..3_usize, short in any::<bool>()) {
        let _turn = turn();
        // Elements of more than half a KiB: runs that are read to where they belong.
        case.widen(700);
        if short {
            arm(0, Fault::Short);
        }
        let report = check(&case, Wanted { digest: true, crc: false }, &options(40_000, threads));
        disarm();
        prop_assert_eq!(report.digests, case.digests());
    }

    #[test]
    fn larger_tensors_in_small_buffers(case in cases(40), threads in 1..4_usize) {
        let _turn = turn();
        let report = check(&case, Wanted { digest: true, crc: false }, &options(16_384, threads));
        let folder = tempfile::tempdir().unwrap();
        let job = case.job(case.prepare(folder.path()), vec![Destination::Nowhere; 4], Wanted { digest: true, crc: false });
        let only = run(&job, &options(50_000, threads), &mut |_, _| Ok(())).unwrap();
        prop_assert_eq!(&only.digests, &report.digests);
        // The pieces of a tensor add up to the tensor.
        let mut at = 0;
        for tensor in &case.tensors {
            let pieces = &report.digests[at..at + tensor.destinations.len()];
            at += pieces.len();
            let whole = shardwise_io::digest::Digest::of(&case.flat(tensor));
            let expected = (0..tensor.times).fold(0, |all, _| sum(all, whole));
            prop_assert_eq!(pieces.iter().fold(0, |all, one| sum(all, *one)), expected);
        }
    }
}

/// Rows of so many elements of 4 bytes, in one file, to these destinations.
fn rows_to(folder: &std::path::Path, [rows, columns]: [i64; 2], to: Vec<Destination>, pieces: &[i64]) -> Job {
    let path = folder.join("source");
    let bytes: Vec<u8> = (0..rows * columns * 4).map(|at| (at % 251) as u8).collect();
    std::fs::write(&path, &bytes).unwrap();
    let source = Source::File(SourceFile { path, size: bytes.len() as i64, ..Default::default() });
    let mut job = Job::new(vec![source], to).unwrap();
    let wanted = Wanted { digest: true, crc: false };
    job.add(4, &[rows, columns], &[0, 0, 0, 0, rows, columns, columns * 4, 4], pieces, wanted, &mut || Ok(())).unwrap();
    job
}

#[test]
fn what_several_destinations_want_is_read_once() {
    let _turn = turn();
    for budget in [16_384, 400_000, 64 << 20] {
        for (times, columns) in [(1, 1), (4, 1), (1, 256), (3, 256), (2, 8), (4, 8)] {
            let folder = tempfile::tempdir().unwrap();
            let (rows, width) = (512, 1024 / columns);
            let pieces: Vec<i64> = (0..times * columns)
                .flat_map(|i| {
                    let column = i % columns * width;
                    [0, i * rows * width * 4, 0, column, rows, column + width, width * 4, 4]
                })
                .collect();
            let job = rows_to(folder.path(), [rows, 1024], vec![Destination::Nowhere], &pieces);
            let report = run(&job, &options(budget, 1), &mut |_, _| Ok(())).unwrap();
            assert_eq!(report.traffic.read, rows * 4096, "{times} times {columns} columns, {budget} bytes");
            for (at, digest) in report.digests.iter().enumerate() {
                assert_eq!(*digest, report.digests[at % columns as usize]);
            }
        }
    }
}

#[test]
fn a_part_of_what_is_read_for_another_is_not_read_again() {
    let _turn = turn();
    let folder = tempfile::tempdir().unwrap();
    // All 64 rows, rows 10 to 20, one column of all, and rows 60 to 64 with columns 5 to 7.
    let pieces: Vec<i64> = [[0, 0, 64, 1024], [10, 0, 20, 1024], [0, 9, 64, 10], [60, 5, 64, 7]]
        .iter()
        .enumerate()
        .flat_map(|(at, b)| [0, at as i64 * 300_000, b[0], b[1], b[2], b[3], (b[3] - b[1]) * 4, 4])
        .collect();
    let job = rows_to(folder.path(), [64, 1024], vec![Destination::Nowhere], &pieces);
    let report = run(&job, &options(4 << 20, 1), &mut |_, _| Ok(())).unwrap();
    assert_eq!(report.traffic.read, 64 * 4096);
}

#[test]
fn many_files_are_written_and_read_once_each() {
    let _turn = turn();
    // More than the descriptors that one side of a job may have.
    let (files, rows) = (2000, 32);
    let folder = tempfile::tempdir().unwrap();
    let path = |at: i64| folder.path().join(format!("{at}"));
    let made = |there| {
        let one = |at| Destination::File { path: path(at), size: rows * 4, there, folder: None };
        (0..files).map(one).collect::<Vec<_>>()
    };
    let pieces: Vec<i64> = (0..files).flat_map(|at| [at, 0, 0, at, rows, at + 1, 4, 4]).collect();
    let job = rows_to(folder.path(), [rows, files], made(false), &pieces);
    let cut = run(&job, &options(4 << 20, 1), &mut |_, _| Ok(())).unwrap();
    assert_eq!((cut.traffic.read, cut.traffic.written), (rows * files * 4, rows * files * 4));
    assert_eq!(cut.traffic.calls, files + 1);
    // There already: each is opened once, looked at once, and written once.
    let job = rows_to(folder.path(), [rows, files], made(true), &pieces);
    arm(i64::MAX, Fault::Short);
    let again = run(&job, &options(4 << 20, 1), &mut |_, _| Ok(())).unwrap();
    let operations = disarm();
    assert_eq!(again.traffic, cut.traffic);
    assert!(operations <= 4 * files + 16, "{operations} operations for {files} files");
    assert_eq!(again.digests, cut.digests);
    // And back.
    let sources =
        (0..files).map(|at| Source::File(SourceFile { path: path(at), size: rows * 4, ..Default::default() }));
    let mut job = Job::new(sources.collect(), vec![Destination::Nowhere]).unwrap();
    let whole = [0, 0, 0, 0, rows, files, files * 4, 4];
    job.add(4, &[rows, files], &pieces, &whole, Wanted { digest: true, crc: false }, &mut || Ok(())).unwrap();
    let back = run(&job, &options(4 << 20, 1), &mut |_, _| Ok(())).unwrap();
    assert_eq!((back.traffic.read, back.traffic.calls), (rows * files * 4, files));
    assert_eq!(back.digests[0], cut.digests.iter().fold(0, |all, one| sum(all, *one)));
}

/// Where no buffer limits it: a thread's two buffers are the budget, and a unit is of four times one of them at most.
#[test]
fn from_memory_to_memory_it_goes_in_units_too() {
    let (size, budget) = (1_i64 << 20, 16_384);
    let (mut from, mut to) = (vec![1_u8; size as usize], vec![0_u8; size as usize]);
    // SAFETY: the vectors outlive the job and are not touched until it is done.
    let memory = |bytes: &mut Vec<u8>| unsafe { Memory::new(bytes.as_mut_ptr(), 0, size) };
    let mut job =
        Job::new(vec![Source::Memory(memory(&mut from))], vec![Destination::Memory(memory(&mut to))]).unwrap();
    let piece = [0, 0, 0, size, 1];
    job.add(1, &[size], &piece, &piece, Wanted::default(), &mut || Ok(())).unwrap();
    let (mut last, mut longest) = (0, 0);
    run(&job, &options(budget, 1), &mut |done, _| {
        longest = longest.max(done - last);
        last = done;
        Ok(())
    })
    .unwrap();
    assert!(0 < longest && longest <= 2 * budget, "{longest}");
    assert_eq!(from, to);
}
