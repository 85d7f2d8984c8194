//! CRC-32C (Castagnoli), by which OCDBT nodes and zarr's shard indexes are checked.

/// The polynomial 0x1EDC6F41, its bits reversed.
const POLYNOMIAL: u32 = 0x82f6_3b78;

/// `TABLES[k][b]`: what the byte `b` leaves after `k` further zero bytes.
static TABLES: [[u32; 256]; 8] = tables();

const fn tables() -> [[u32; 256]; 8] {
    let mut tables = [[0; 256]; 8];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ POLYNOMIAL } else { crc >> 1 };
            bit += 1;
        }
        tables[0][byte] = crc;
        byte += 1;
    }
    let mut table = 1;
    while table < 8 {
        let mut byte = 0;
        while byte < 256 {
            let before = tables[table - 1][byte];
            tables[table][byte] = before >> 8 ^ tables[0][(before & 0xff) as usize];
            byte += 1;
        }
        table += 1;
    }
    tables
}

/// The CRC-32C of some bytes.
///
/// ```
/// // The check value of RFC 3720's CRC.
/// assert_eq!(shardwise_io::crc32c::crc32c(b"123456789"), 0xe306_9283);
/// ```
#[must_use]
pub fn crc32c(bytes: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    let mut chunks = bytes.chunks_exact(8);
    for chunk in &mut chunks {
        let mut word = [0; 8];
        word.copy_from_slice(chunk);
        let word = (u64::from_le_bytes(word) ^ u64::from(crc)).to_le_bytes();
        crc = (0..8).fold(0, |crc, i| crc ^ TABLES[7 - i][word[i] as usize]);
    }
    for &byte in chunks.remainder() {
        crc = crc >> 8 ^ TABLES[0][((crc ^ u32::from(byte)) & 0xff) as usize];
    }
    !crc
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_rfc_3720() {
        let ascending: Vec<u8> = (0..32).collect();
        let descending: Vec<u8> = (0..32).rev().collect();
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(&ascending), 0x46dd_794e);
        assert_eq!(crc32c(&descending), 0x113f_db5c);
        assert_eq!(crc32c(b""), 0);
    }

    #[test]
    fn eight_bytes_at_a_time_are_one_byte_at_a_time() {
        let bytes: Vec<u8> = (0..100_u32).map(|i| (i * i * 31 + 7) as u8).collect();
        for stop in 0..bytes.len() {
            let mut crc = u32::MAX;
            for &byte in &bytes[..stop] {
                crc = crc >> 8 ^ TABLES[0][((crc ^ u32::from(byte)) & 0xff) as usize];
            }
            assert_eq!(crc32c(&bytes[..stop]), !crc);
        }
    }
}
