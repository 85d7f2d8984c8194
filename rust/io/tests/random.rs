//! Random boxes from random files to random files, against a loop over bytes.

mod common;

use std::sync::{Mutex, MutexGuard};

use common::{Case, cases};
use proptest::prelude::*;
use shardwise_io::{
    digest::sum,
    faults::{Fault, arm, disarm},
    job::{Destination, Memory, Source, SourceFile, Wanted},
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
            prop_assert_eq!(pieces.iter().fold(0, |all, one| sum(all, *one)), shardwise_io::digest::Digest::of(&case.flat(tensor)));
        }
    }
}
