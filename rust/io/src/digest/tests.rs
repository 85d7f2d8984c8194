//! The digest against its definition, bit by bit, and the constants against SplitMix64.

use super::*;
use proptest::prelude::*;

/// `a · b mod p`, bit by bit.
fn slow_product(a: u128, b: u128) -> u128 {
    (0..127).rev().fold(0, |all, bit| {
        let doubled = sum(all, all);
        if b >> bit & 1 == 1 { sum(doubled, a) } else { doubled }
    })
}

/// The definition, word by word.
fn slow_digest(bytes: &[u8]) -> u128 {
    bytes.chunks(8).enumerate().fold(0, |all, (k, word)| {
        let mut padded = [0; 8];
        padded[..word.len()].copy_from_slice(word);
        let term = slow_product(u128::from(u64::from_le_bytes(padded)), u128::from(KEYS[k % 512]));
        let radix = (0..k / 512).fold(1, |all, _| slow_product(all, RADIX));
        sum(all, slow_product(term, radix))
    })
}

#[test]
fn the_constants_are_those_of_split_mix() {
    // The reference outputs of SplitMix64 from seed 0 (Vigna's splitmix64.c).
    let outputs = [0xe220_a839_7b1d_cdaf_u64, 0x6e78_9e6a_a1b9_65f4, 0x06c4_5d18_8009_454f];
    assert_eq!(KEYS[..3], outputs.map(|output| output >> 3));
    // As a few lines of Python have it.
    assert_eq!(RADIX, 0x3fc_c71f_a883_3aa3_327e_ee6e_c959_8964);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn products_are_those_of_long_multiplication(a in 0..P, b in 0..P) {
        prop_assert_eq!(product(a, b), slow_product(a, b));
        for edge in [0, 1, P - 1] {
            prop_assert_eq!(product(a, edge), slow_product(a, edge));
        }
    }

    #[test]
    fn any_cut_in_any_order_adds_up_to_the_definition(
        length in 0..20_000_usize,
        seed in any::<u64>(),
        mut cuts in prop::collection::vec(0..20_000_usize, 0..8),
        turn in 0..8_usize,
    ) {
        let bytes: Vec<u8> = (0..length as u64).map(|i| split_mix(seed ^ i).1 as u8).collect();
        let expected = slow_digest(&bytes);
        prop_assert_eq!(Digest::of(&bytes), expected);
        cuts.iter_mut().for_each(|cut| *cut = (*cut).min(length));
        cuts.extend([0, length]);
        cuts.sort_unstable();
        let mut runs: Vec<(usize, usize)> = cuts.windows(2).map(|cut| (cut[0], cut[1])).collect();
        let turn = turn % runs.len();
        runs.rotate_left(turn);
        let (mut one, mut total) = (Digest::default(), 0);
        for &(start, stop) in &runs {
            one.add(start as i64, &bytes[start..stop]);
            let mut piece = Digest::default();
            piece.add(start as i64, &bytes[start..stop]);
            total = sum(total, piece.value());
        }
        prop_assert_eq!(one.value(), expected);
        prop_assert_eq!(total, expected);
    }

    #[test]
    fn columns_add_up_to_the_whole(rows in 1..40_usize, width in 1..60_usize, cut in 0..60_usize) {
        let cut = cut.min(width);
        let bytes: Vec<u8> = (0..rows * width).map(|i| split_mix(i as u64).1 as u8).collect();
        let mut parts = [Digest::default(), Digest::default()];
        for (row, line) in bytes.chunks(width).enumerate() {
            parts[0].add((row * width) as i64, &line[..cut]);
            parts[1].add((row * width + cut) as i64, &line[cut..]);
        }
        prop_assert_eq!(sum(parts[0].value(), parts[1].value()), Digest::of(&bytes));
    }
}

#[test]
fn the_largest_words_do_not_overflow_a_sum() {
    for length in [8, 128, 129, 4096, 9000] {
        let bytes = vec![0xff; length];
        assert_eq!(Digest::of(&bytes), slow_digest(&bytes));
    }
}

#[test]
fn every_flipped_bit_and_every_exchange_of_blocks_is_seen() {
    let mut bytes: Vec<u8> = (0..3 * 4096_u64).map(|i| split_mix(i).1 as u8).collect();
    let digest = Digest::of(&bytes);
    for byte in (0..bytes.len()).step_by(97) {
        for bit in 0..8 {
            bytes[byte] ^= 1 << bit;
            assert_ne!(Digest::of(&bytes), digest, "byte {byte}, bit {bit}");
            bytes[byte] ^= 1 << bit;
        }
    }
    bytes.rotate_left(4096);
    assert_ne!(Digest::of(&bytes), digest);
}
