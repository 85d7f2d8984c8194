//! A digest of a tensor that does not depend on how the tensor is cut.
//!
//! # The sum
//!
//! The tensor's bytes in C order are little-endian words of 8 bytes, the last one filled with zeros:
//! `W₀, W₁, …`. With `B = 512` words (4 KiB) to a block and `p = 2¹²⁷ − 1`, which is prime, the digest is
//!
//! ```text
//! H = Σ_k  W_k · K_{k mod B} · R^⌊k/B⌋   mod p
//! ```
//!
//! `K₀ … K₅₁₁` are 61-bit constants and `R` is a 127-bit constant: outputs of SplitMix64 from seed 0 (see [`KEYS`],
//! [`RADIX`]).
//!
//! # Why this one
//!
//! It is linear in the bytes. A piece of the tensor, be it a column slice that breaks words apart, has a digest of its
//! own, with zeros for all it does not hold, and the digests of pieces that tile the tensor add up (mod p) to the
//! tensor's. The order in which they are read does not matter, nor does the reader. So checkpoints that are cut
//! differently are compared without a merge, a piece in a file is verified by the number that also proves the whole,
//! and a run that was killed goes on from the sums that it had. Digests that chain their input (SHA-256, XXH3) can do
//! none of this; a tree of hashes over fixed blocks can as long as every cut falls between blocks; CRCs can, but 32 bits
//! are few for 10⁹ pieces and a wider CRC needs instructions that not every processor has.
//!
//! # What it detects
//!
//! Let two tensors of one shape differ, in a way that does not depend on the constants. Within a block, for random keys,
//! the words' differences cancel with probability 2⁻⁶¹ at most: all keys but one being chosen, `Δ_j · K_j = c (mod p)`
//! has at most one solution, for `p` is prime and 0 < |Δ_j| < p. Over the blocks, what is left is a polynomial in `R`
//! of degree n/B, with that many roots of 2¹²⁷ at most: 2⁻⁹⁹ for a tensor of 1 TiB. In all, 2⁻⁶¹. Blocks or words
//! that are exchanged, shifted or zeroed are differences like any other.
//!
//! It is not cryptographic. The constants are known, so two tensors of one digest can be made on purpose. And zeros
//! add nothing: compare shape and dtype as well, as two tensors of zeros have the digest 0.
//!
//! # What it costs
//!
//! Six multiplications of 32 × 21 bits per word, four words at a time in vector registers ([`LIMBS`]), one of 127 bits per
//! block, and two per run that begins in a block of its own: some 20 GB/s on one core, and what is not in a
//! cache is digested as fast as it is read. Short runs take one multiplication of 64 × 64 bits per word, at half that speed. The
//! alternatives: a polynomial mod 2⁶¹ − 1 takes as many multiplications for words of 7 bytes, and needs two of them, since
//! its error grows with the length (2⁻³³ for 1 GiB).

use multiversion::multiversion;

/// Words in a block.
const BLOCK_WORDS: usize = 512;
/// Bytes in a block.
const BLOCK: i64 = 8 * BLOCK_WORDS as i64;
/// Products of 64 × 61 bits that add up to less than 2¹²⁸.
const ROW: usize = 8;
/// Words from which on vector registers are worth their set-up.
const MANY: usize = 32;
/// Bits of a limb of a key. A limb times half a word has 53 bits, so the products of a block add up to less than 2⁶².
const LIMB: u32 = 21;
/// The modulus, a prime.
const P: u128 = (1 << 127) - 1;

/// The factors of the words of a block: the first 512 outputs of SplitMix64 from seed 0, without their lowest 3 bits.
pub const KEYS: [u64; BLOCK_WORDS] = constants().0;

/// The keys in limbs, the lowest first.
static LIMBS: [[u64; BLOCK_WORDS]; 3] = {
    let (mut limbs, mut i) = ([[0; BLOCK_WORDS]; 3], 0);
    while i < 3 * BLOCK_WORDS {
        let (limb, key) = (i / BLOCK_WORDS, i % BLOCK_WORDS);
        limbs[limb][key] = KEYS[key] >> (limb as u32 * LIMB) & ((1 << LIMB) - 1);
        i += 1;
    }
    limbs
};

/// The factor from block to block: of the next two outputs, the first is the upper half and the second the lower, less
/// the top bit.
pub const RADIX: u128 = constants().1;

/// `R` to the powers of 2.
const SQUARES: [u128; 64] = {
    let mut squares = [RADIX; 64];
    let mut i = 1;
    while i < 64 {
        squares[i] = product(squares[i - 1], squares[i - 1]);
        i += 1;
    }
    squares
};

const fn constants() -> ([u64; BLOCK_WORDS], u128) {
    let (mut keys, mut seed, mut i) = ([0; BLOCK_WORDS], 0, 0);
    while i < BLOCK_WORDS {
        let (next, output) = split_mix(seed);
        (seed, keys[i]) = (next, output >> 3);
        i += 1;
    }
    let (seed, upper) = split_mix(seed);
    let (_, lower) = split_mix(seed);
    (keys, (((upper as u128) << 64) | lower as u128) & P)
}

/// The next state and the next output of SplitMix64, whose arithmetic is modulo 2⁶⁴.
const fn split_mix(state: u64) -> (u64, u64) {
    let state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (state, z ^ (z >> 31))
}

/// `x mod p` for any `x`, since 2¹²⁷ = 1 mod p.
const fn reduced(x: u128) -> u128 {
    let folded = (x & P) + (x >> 127);
    if folded >= P { folded - P } else { folded }
}

/// `a + b mod p` of two residues.
#[must_use]
pub const fn sum(a: u128, b: u128) -> u128 {
    reduced(a + b)
}

/// `a · b mod p` of two residues: the product of 254 bits in halves of 64, folded at bit 127.
const fn product(a: u128, b: u128) -> u128 {
    const LOW: u128 = u64::MAX as u128;
    let (a1, a0, b1, b0) = (a >> 64, a & LOW, b >> 64, b & LOW);
    // a1, b1 < 2⁶³: no sum of products below is over 2¹²⁸.
    let middle = a1 * b0 + ((a0 * b0) >> 64);
    let carried = a0 * b1 + (middle & LOW);
    let upper = a1 * b1 + (middle >> 64) + (carried >> 64);
    let lower = (carried << 64) | ((a0 * b0) & LOW);
    // upper < 2¹²⁶, so twice it fits.
    sum(reduced(lower), reduced(upper << 1))
}

/// `R` to the power of `exponent`.
fn power(exponent: u64) -> u128 {
    (0..64).filter(|bit| exponent >> bit & 1 == 1).fold(1, |all, bit| product(all, SQUARES[bit]))
}

/// A digest that is being added up.
///
/// ```
/// use shardwise_io::digest::{Digest, sum};
/// let bytes: Vec<u8> = (0..=255).cycle().take(10_000).collect();
/// let whole = Digest::of(&bytes);
/// let (mut left, mut right) = (Digest::default(), Digest::default());
/// left.add(0, &bytes[..4321]);
/// right.add(4321, &bytes[4321..]);
/// assert_eq!(sum(left.value(), right.value()), whole);
/// ```
#[derive(Debug, Clone)]
pub struct Digest {
    /// The sum over the blocks before the current one.
    total: u128,
    /// The current block, and `R` to its power.
    block: i64,
    power: u128,
    /// The last distance from block to block, and `R` to its power: rows of a tensor are equally far apart.
    step: (i64, u128),
    /// The sum over the words of the current block: modulo 2¹²⁸, and how often that was passed.
    inner: Wide,
}

impl Default for Digest {
    fn default() -> Self {
        Self { total: 0, block: 0, power: 1, step: (0, 1), inner: Wide::default() }
    }
}

impl Digest {
    /// The digest of a whole tensor whose bytes are these.
    #[must_use]
    pub fn of(bytes: &[u8]) -> u128 {
        let mut digest = Self::default();
        digest.add(0, bytes);
        digest.value()
    }

    /// Adds a run of the tensor that begins at byte `position` of its C order, which is not negative.
    pub fn add(&mut self, position: i64, bytes: &[u8]) {
        let (mut position, mut rest) = (position, bytes);
        while !rest.is_empty() {
            self.enter(position / BLOCK);
            let within = position % BLOCK;
            let (part, after) = rest.split_at(rest.len().min((BLOCK - within) as usize));
            prefetch(&after[..after.len().min(BLOCK as usize)]);
            self.inner.add(within as usize, part);
            position += part.len() as i64;
            rest = after;
        }
    }

    /// The digest of what was added: a residue modulo 2¹²⁷ − 1.
    #[must_use]
    pub fn value(&self) -> u128 {
        sum(self.total, product(self.inner.residue(), self.power))
    }

    #[inline]
    fn enter(&mut self, block: i64) {
        if block == self.block {
            return;
        }
        self.total = self.value();
        self.inner = Wide::default();
        let step = block - self.block;
        self.power = match step {
            1 => product(self.power, RADIX),
            _ if step < 0 => power(block as u64),
            _ => {
                if step != self.step.0 {
                    self.step = (step, power(step as u64));
                }
                product(self.power, self.step.1)
            }
        };
        self.block = block;
    }
}

/// A sum of products of 64 × 64 bits.
#[derive(Debug, Clone, Copy, Default)]
struct Wide {
    low: u128,
    /// A block adds 512 products; entering it again at most as many as there are runs.
    carries: u64,
}

impl Wide {
    #[inline(always)]
    fn product(&mut self, word: u64, key: u64) {
        self.plus(u128::from(word) * u128::from(key));
    }

    #[inline(always)]
    fn plus(&mut self, products: u128) {
        let (low, carried) = self.low.overflowing_add(products);
        self.low = low;
        self.carries += u64::from(carried);
    }

    /// Adds the products of lower and of upper halves of words, those with each limb of the keys apart.
    fn halves(&mut self, halves: [[u64; 3]; 2]) {
        // 62 bits and twice the bits of a limb: less than 2¹⁰⁵.
        let joined = |limbs: [u64; 3]| limbs.iter().rev().fold(0, |all, &limb| (all << LIMB) + u128::from(limb));
        let [lower, upper] = halves.map(joined);
        self.plus(lower);
        self.plus(upper << 32);
        self.carries += (upper >> 96) as u64;
    }

    fn residue(self) -> u128 {
        sum(reduced(self.low), reduced(u128::from(self.carries) << 1))
    }

    /// Adds bytes of a block from byte `within` of it on.
    #[inline]
    fn add(&mut self, within: usize, bytes: &[u8]) {
        let (mut word, skipped) = (within / 8, within % 8);
        let mut rest = bytes;
        if skipped > 0 {
            let head;
            (head, rest) = rest.split_at(rest.len().min(8 - skipped));
            self.product(partial(head) << (8 * skipped), KEYS[word]);
            word += 1;
        }
        let (words, tail) = rest.as_chunks::<8>();
        if words.len() >= MANY {
            self.halves(products(words, word));
        } else {
            for (row, keys) in words.chunks(ROW).zip(KEYS[word.min(BLOCK_WORDS)..].chunks(ROW)) {
                let each = row.iter().zip(keys);
                let products = each.map(|(word, key)| u128::from(u64::from_le_bytes(*word)) * u128::from(*key));
                self.plus(products.fold(0, u128::wrapping_add));
            }
        }
        if !tail.is_empty() {
            self.product(partial(tail), KEYS[word + words.len()]);
        }
    }
}

/// The sums of the products of words of a block, from word `first` of it on: of their lower and their upper halves, each
/// with each limb of the keys.
#[multiversion(targets("x86_64+avx2"))]
fn products(words: &[[u8; 8]], first: usize) -> [[u64; 3]; 2] {
    let [low, middle, high] = LIMBS.each_ref().map(|limbs| &limbs[first..][..words.len()]);
    let mut sums = [[0_u64; 3]; 2];
    for (((word, low), middle), high) in words.iter().zip(low).zip(middle).zip(high) {
        let word = u64::from_le_bytes(*word);
        for (half, sums) in [word & 0xffff_ffff, word >> 32].into_iter().zip(&mut sums) {
            for (limb, sum) in [low, middle, high].into_iter().zip(sums) {
                // At most 512 products of 53 bits: `LIMB`. The mask is what shows that 32 bits are enough.
                *sum = sum.wrapping_add(half.wrapping_mul(limb & 0xffff_ffff));
            }
        }
    }
    sums
}

/// Asks for bytes that are needed next: processors see ahead no further than a few products, which is not far enough to read
/// memory at its own speed.
#[inline]
fn prefetch(bytes: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    for line in bytes.chunks(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: it reads nothing, and every x86-64 has it.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = bytes;
}

/// A word of up to 8 bytes, the lowest first.
#[inline]
fn partial(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |word, &byte| (word << 8) | u64::from(byte))
}

#[cfg(test)]
mod tests;
