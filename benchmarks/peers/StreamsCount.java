// The job of count.py on Kafka Streams with exactly_once_v2: count the records of each key, send the count. With
// WINDOW_MS that of windows.py: count in tumbling windows, and send the final count of each.
//
// java StreamsCount BOOTSTRAP SOURCE TARGET COUNT GROUP THREADS DIRECTORY CACHE_BYTES [WINDOW_MS] [NAME=VALUE...]
// prints: records, seconds from the first record to the commit that covers the last one, seconds of the second half.
// With a cache an output is sent for each key and commit, without one for each record. What is restored goes to the
// standard error: "restored", records so far, seconds since the first of them.

import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.Properties;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.atomic.LongAdder;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.ListConsumerGroupOffsetsOptions;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.processor.StateRestoreListener;
import org.apache.kafka.streams.kstream.KGroupedStream;
import org.apache.kafka.streams.kstream.KStream;
import org.apache.kafka.streams.kstream.Materialized;
import org.apache.kafka.streams.kstream.Suppressed;
import org.apache.kafka.streams.kstream.TimeWindows;
import org.apache.kafka.streams.state.Stores;

public final class StreamsCount {
    private static final AtomicLong first = new AtomicLong();
    private static final LongAdder handled = new LongAdder();

    public static void main(String[] arguments) throws Exception {
        long count = Long.parseLong(arguments[3]);
        String group = arguments[4];
        Properties settings = new Properties();
        settings.put("bootstrap.servers", arguments[0]);
        settings.put("application.id", group);
        settings.put("processing.guarantee", "exactly_once_v2");
        settings.put("commit.interval.ms", "100");
        settings.put("num.stream.threads", arguments[5]);
        settings.put("state.dir", arguments[6]);
        settings.put("statestore.cache.max.bytes", arguments[7]);
        settings.put("auto.offset.reset", "earliest");
        settings.put("replication.factor", "1");
        settings.put("group.instance.id", group); // as the worker's: a restart gets its partitions without a rebalance
        settings.put("default.key.serde", Serdes.ByteArraySerde.class.getName());
        settings.put("default.value.serde", Serdes.ByteArraySerde.class.getName());
        settings.put("processing.exception.handler.global.enabled", "true");
        String windowMs = null;
        for (int at = 8; at < arguments.length; at++) {
            String[] setting = arguments[at].split("=", 2);
            if (setting.length == 2) {
                settings.put(setting[0], setting[1]);
            } else {
                windowMs = arguments[at];
            }
        }
        StreamsBuilder builder = new StreamsBuilder();
        KGroupedStream<byte[], byte[]> grouped = builder.<byte[], byte[]>stream(arguments[1])
                .peek((key, value) -> {
                    if (first.get() == 0) {
                        first.compareAndSet(0, System.nanoTime());
                    }
                    handled.increment();
                })
                .groupByKey();
        KStream<byte[], Long> counts = windowMs != null
                ? grouped.windowedBy(TimeWindows.ofSizeWithNoGrace(Duration.ofMillis(Long.parseLong(windowMs))))
                        .count(Materialized.with(Serdes.ByteArray(), Serdes.Long()))
                        .suppress(Suppressed.untilWindowCloses(Suppressed.BufferConfig.unbounded()))
                        .toStream()
                        .selectKey((window, counted) -> window.key())
                : grouped.count(Materialized.<byte[], Long>as(Stores.persistentKeyValueStore("counts"))
                                .withKeySerde(Serdes.ByteArray())
                                .withValueSerde(Serdes.Long()))
                        .toStream();
        counts.mapValues(counted -> Long.toString(counted).getBytes(StandardCharsets.US_ASCII)).to(arguments[2]);
        try (KafkaStreams streams = new KafkaStreams(builder.build(), settings);
                Admin admin = Admin.create(settings)) {
            streams.setGlobalStateRestoreListener(new Restored());
            streams.start();
            long middle = awaitHandled(streams, count / 2);
            awaitHandled(streams, count);
            while (committed(admin, group, arguments[1]) < count) {
                Thread.sleep(5);
            }
            long end = System.nanoTime();
            System.out.printf("%d %.4f %.4f%n", count, (end - first.get()) / 1e9, (end - middle) / 1e9);
        }
    }

    private static final class Restored implements StateRestoreListener {
        private final AtomicLong began = new AtomicLong();
        private final LongAdder records = new LongAdder();

        @Override
        public void onRestoreStart(TopicPartition partition, String store, long from, long to) {
            began.compareAndSet(0, System.nanoTime());
        }

        @Override
        public void onBatchRestored(TopicPartition partition, String store, long to, long count) {
            records.add(count);
        }

        @Override
        public void onRestoreEnd(TopicPartition partition, String store, long total) {
            System.err.printf("restored %d %.3f%n", records.sum(), (System.nanoTime() - began.get()) / 1e9);
        }
    }

    private static long awaitHandled(KafkaStreams streams, long count) throws InterruptedException {
        while (handled.sum() < count) {
            if (streams.state() == KafkaStreams.State.ERROR) {
                throw new IllegalStateException("Kafka Streams stopped with an error");
            }
            Thread.sleep(1);
        }
        return System.nanoTime();
    }

    private static long committed(Admin admin, String group, String source) throws Exception {
        return admin.listConsumerGroupOffsets(group, new ListConsumerGroupOffsetsOptions().requireStable(true))
                .partitionsToOffsetAndMetadata()
                .get()
                .entrySet()
                .stream()
                .filter(one -> one.getValue() != null && one.getKey().topic().equals(source))
                .mapToLong(one -> one.getValue().offset())
                .sum();
    }
}
