// The job of speed.py on Kafka Streams with exactly_once_v2: upper-case the ASCII value, keep key and timestamp.
//
// java StreamsUpper BOOTSTRAP SOURCE TARGET COUNT GROUP THREADS DIRECTORY
// prints: records, seconds from the first record to the commit that covers the last one, seconds of the second half.
// The second half is told because a JVM compiles while the first one runs.

import java.util.Collection;
import java.util.Properties;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.atomic.LongAdder;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.ListConsumerGroupOffsetsOptions;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StreamsBuilder;

public final class StreamsUpper {
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
        settings.put("auto.offset.reset", "earliest");
        settings.put("default.key.serde", Serdes.ByteArraySerde.class.getName());
        settings.put("default.value.serde", Serdes.ByteArraySerde.class.getName());
        // Without it every thread warns that the next major version will.
        settings.put("processing.exception.handler.global.enabled", "true");
        StreamsBuilder builder = new StreamsBuilder();
        builder.<byte[], byte[]>stream(arguments[1]).mapValues(StreamsUpper::upper).to(arguments[2]);
        try (KafkaStreams streams = new KafkaStreams(builder.build(), settings);
                Admin admin = Admin.create(settings)) {
            streams.start();
            long middle = awaitHandled(streams, count / 2);
            awaitHandled(streams, count);
            while (committed(admin, group) < count) {
                Thread.sleep(5);
            }
            long end = System.nanoTime();
            System.out.printf("%d %.4f %.4f%n", count, (end - first.get()) / 1e9, (end - middle) / 1e9);
        }
    }

    private static byte[] upper(byte[] value) {
        if (first.get() == 0) {
            first.compareAndSet(0, System.nanoTime());
        }
        handled.increment();
        byte[] result = new byte[value.length];
        for (int at = 0; at < value.length; at++) {
            byte letter = value[at];
            result[at] = letter >= 'a' && letter <= 'z' ? (byte) (letter - 32) : letter;
        }
        return result;
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

    private static long committed(Admin admin, String group) throws Exception {
        Collection<OffsetAndMetadata> offsets = admin.listConsumerGroupOffsets(
                        group, new ListConsumerGroupOffsetsOptions().requireStable(true))
                .partitionsToOffsetAndMetadata()
                .get()
                .values();
        return offsets.stream().filter(one -> one != null).mapToLong(OffsetAndMetadata::offset).sum();
    }
}
